"""Commands on jobs on this machine: real ones, small enough to be over in a second."""

import json
import re
import signal
import subprocess
import sys
from itertools import takewhile

import pytest
from waiting import until

from k8sjob.contract import Event, EventKind

# What the jobs run: the container's agent is not part of these tests, so it is a mere command.
PROGRAM = f"""\
import os, signal, sys, time
rank, mode = os.environ["RANK"], sys.argv[1]
def stopped(*_):
    print("saved", flush=True)
    os._exit(143)
signal.signal(signal.SIGTERM, stopped)
print(f"rank {{rank}} [bold]here[/bold] \\x1b[31mred\\x1b]0;title\\x07", flush=True)
if rank == "0":
    print({Event(EventKind.PROGRESS, {"epoch": 0, "epochs": 2, "step": 5, "steps": 10,
                                      "loss": 0.5, "restart": 7}, 9e9).encode()!r}, flush=True)
if mode == "fail":
    raise SystemExit(3)
if mode == "wait":
    for _ in range(600):
        time.sleep(0.1)
"""  # fmt: skip


@pytest.fixture
def job(job_file, tmp_path):
    """Writes the job.yaml of a job that ends well, fails, or waits."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def write(mode, *lines, name="tiny"):
        file = job_file(*lines, name=name)
        command = f"{{command: [python, program.py, {mode}]}}"
        file.write_text(file.read_text().replace("{script: main.py}", command))
        return file

    return write


def test_a_job_that_ends_well(job, k8sjob, tmp_path):
    file = job("end", "replicas: {workers: 1}")
    done = k8sjob("run", file)
    assert done.code == 0, done.err
    assert done.err == ""
    assert "worker-0 | rank 1 [bold]here[/bold] red\n" in done.out
    assert "master-0 | epoch 1/2  step 5/10  loss 0.5\n" in done.out
    assert re.search(r"^tiny Succeeded after \d:\d\d$", done.out, re.MULTILINE)
    assert "\x1b" not in done.out

    listed = k8sjob("list")
    header, row = listed.out.splitlines()
    assert header.split() == ["NAME", "STATE", "REPLICAS", "AGE", "TIME", "PROGRESS"]
    assert row.split()[:4] == ["local/tiny", "Succeeded", "2", "Succeeded"]
    assert k8sjob("list", "-o", "name").out == "local/tiny\n"
    assert "UID" in k8sjob("list", "-o", "wide").out

    status = json.loads(k8sjob("status", "local/tiny", "-o", "json").out)
    assert status["state"] == "Succeeded"
    assert [replica["name"] for replica in status["replicas"]] == ["master-0", "worker-0"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", status["finished"])
    assert status.pop("checkpoints") is None  # that is in status alone
    assert status.pop("written") == []
    assert json.loads(k8sjob("list", "-o", "json").out) == [status]
    assert "REPLICA" in k8sjob("status", "tiny").out
    assert k8sjob("status", "tiny", "--exit-code").code == 0

    assert k8sjob("logs", "tiny", "-r", "worker").out == "rank 1 [bold]here[/bold] red\n"
    assert k8sjob("logs", "tiny", "--rank", "0").out == (
        "rank 0 [bold]here[/bold] red\nepoch 1/2  step 5/10  loss 0.5\n"
    )
    assert set(k8sjob("logs", "tiny", "--tail", "1").out.splitlines()) == {
        "master-0 | epoch 1/2  step 5/10  loss 0.5",
        "worker-0 | rank 1 [bold]here[/bold] red",
    }
    (raw,) = k8sjob("logs", "tiny", "-r", "worker", "-o", "json").out.splitlines()
    assert json.loads(raw)["text"] == "rank 1 [bold]here[/bold] \x1b[31mred\x1b]0;title\x07"
    timed = k8sjob("logs", "tiny", "-r", "worker", "--timestamps").out
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z rank 1", timed)
    assert k8sjob("logs", "tiny", "--grep", "^RANK|Red$").out == ""
    assert k8sjob("logs", "tiny", "--grep", "(?i)^RANK 1.*red$", "-f").out.count("\n") == 1
    assert "'(' is not a regular expression" in k8sjob("logs", "tiny", "--grep", "(").err
    assert k8sjob("logs", "tiny", "-f").out.count("\n") == 3
    saved = k8sjob("logs", "tiny", "--save", tmp_path / "saved").out.splitlines()
    assert saved == [str(tmp_path / "saved" / f"tiny-{r}-0.0.log") for r in ("master", "worker")]
    assert "\x1b[31mred" in (tmp_path / "saved" / "tiny-worker-0.0.log").read_text()
    assert k8sjob("logs", "tiny", "--save", tmp_path, "-o", "json").code == 2
    assert k8sjob("logs", "tiny", "--since", "1d").out.count("\n") == 3

    assert k8sjob("why", "tiny").out == "local/tiny succeeded\n"
    watched = k8sjob("watch", "tiny", "-o", "plain")
    assert watched.code == 0
    assert "worker-0 | rank 1 [bold]here[/bold] red\n" in watched.out

    assert k8sjob("delete", "tiny").out == "local/tiny deleted\n"
    assert k8sjob("list") == (0, "", "no jobs on this machine; start one with k8sjob run\n")
    gone = k8sjob("status", "tiny")
    assert gone.code == 102
    assert gone.err.startswith("error: no job 'tiny' on this machine")


def test_a_loss_that_is_no_number_is_reported_although_the_job_succeeded(job, k8sjob, tmp_path):
    file = job("end")
    (tmp_path / "program.py").write_text(PROGRAM.replace('"loss":0.5', '"loss":NaN'))
    for command in (["run", file], ["status", "tiny"], ["why", "tiny"]):
        done = k8sjob(*command)
        assert done.code == 0
        assert "why: the loss has been nan since epoch 1, step 5" in done.out


def test_two_folders_may_use_one_name(job, k8sjob, tmp_path, monkeypatch):
    saves = (
        "import os, pathlib\n"
        "saves = pathlib.Path(os.environ['K8SJOB_CHECKPOINT_DIR'])\n"
        "print('found', os.listdir(saves))\n"
        "(saves / 'mine').touch()\n"
        "raise SystemExit(3)\n"
    )
    first = job("end", "checkpoint: {dir: /checkpoints}", "policy: {restart_policy: Never}")
    (tmp_path / "program.py").write_text(saves)
    other = tmp_path / "other"
    other.mkdir()
    for file in (first, tmp_path / "program.py"):
        (other / file.name).write_text(file.read_text())
    assert "found []" in k8sjob("run", first).out
    assert "found ['mine']" in k8sjob("run", first).out
    strange = k8sjob("run", other / first.name)
    assert "found []" in strange.out
    assert f"it ran in {tmp_path}" in strange.out
    *_, again, oldest = names = k8sjob("list", "-o", "name").out.split()
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"local/tiny@[0-9a-f]{8}", name) for name in names)
    monkeypatch.chdir("/")
    assert "'tiny' is ambiguous; specify one of local/tiny@" in k8sjob("status", "tiny").err
    monkeypatch.chdir(tmp_path)
    uids = [json.loads(k8sjob("status", n, "-o", "json").out)["uid"] for n in ("tiny", again)]
    assert uids[0] == uids[1]
    assert k8sjob("status", f"blue/{oldest.partition('/')[2]}").code == 2
    assert "--resume" in k8sjob("run", first, "--fresh", "--resume", oldest).err
    resumed = k8sjob("run", other / first.name, "--resume", oldest)
    assert "found ['mine']" in resumed.out
    assert k8sjob("run", first, "--resume", "99999999").code == 102
    assert "found []" in k8sjob("run", first, "--fresh").out
    assert k8sjob("delete", oldest).code == 0
    assert oldest not in k8sjob("list", "-o", "name").out


def test_delete_says_where_the_checkpoints_stay(job, k8sjob, tmp_path):
    file = job("end", "checkpoint: {dir: /checkpoints}")
    save = "import os, pathlib; pathlib.Path(os.environ['K8SJOB_CHECKPOINT_DIR'], 'x').touch()"
    (tmp_path / "program.py").write_text(save)
    assert k8sjob("run", file).code == 0
    folder = k8sjob("status", "tiny").out.partition("CHECKPOINTS\n")[2].splitlines()[0]
    assert json.loads(k8sjob("status", "tiny", "-o", "json").out)["checkpoints"] == folder
    done = k8sjob("delete", "tiny")
    assert done.out == "local/tiny deleted\n"
    assert f"its checkpoints remain in {folder} (" in done.err
    assert re.fullmatch(r"its checkpoints remain in (/.*) \(0 bytes\)\n", done.err)
    assert k8sjob("run", file).code == 0
    assert k8sjob("delete", "tiny", "--checkpoints") == (0, "local/tiny deleted\n", "")
    assert len(list((tmp_path / "state/checkpoints/tiny").iterdir())) == 1


def test_delete_by_age_deletes_jobs_that_ended_that_long_ago(job, k8sjob):
    assert k8sjob("run", job("end")).code == 0
    assert k8sjob("delete", "--local", "--all", "--older-than", "1d").err == "nothing to delete\n"
    done = k8sjob("delete", "--local", "--all", "--older-than", "0s")
    assert (done.code, done.out) == (0, "local/tiny deleted\n")
    refused = k8sjob("delete", "tiny", "--older-than", "7d")
    assert refused.code == 2
    assert "--older-than needs -l SELECTOR or --all" in refused.err


def test_the_time_to_the_first_step_is_split(job, k8sjob):
    assert k8sjob("run", job("end", "replicas: {workers: 1}")).code == 0
    done = k8sjob("why", "--timing", "tiny")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("local/tiny: about ")
    table, others = done.out.split("\n\n")[1:3]
    first, *_, last = table.splitlines()
    assert first.split() == ["UNTIL", "TOOK", "AT", "REPLICA", "DETAIL"]
    assert "first step" in last  # with what a program without a session does not tell
    assert {line.split()[0] for line in others.splitlines()[1:]} == {"master-0", "worker-0"}
    shown = json.loads(k8sjob("why", "--timing", "tiny", "-o", "json").out)
    assert (shown["name"], shown["namespace"]) == ("tiny", "local")
    assert shown["phases"][-1]["phase"].endswith("step")
    assert shown["seconds"] == pytest.approx(shown["phases"][-1]["at"], abs=0.01)


def test_all_jobs_of_this_machine_are_watched_where_no_cluster_is_configured(job, k8sjob, process):
    watching = process("watch")
    running = process("run", job("wait"))
    until(lambda: "local/tiny" in watching.stdout.readline())
    running.send_signal(signal.SIGINT)
    until(lambda: "Stopped" in watching.stdout.readline())
    watching.send_signal(signal.SIGINT)
    assert watching.wait(60) == 130
    assert "omit them or NAME" in k8sjob("watch", "tiny", "-A").err


def test_a_job_that_fails_shows_why_by_itself(job, k8sjob):
    file = job("fail", "policy: {restart_policy: Never}")
    done = k8sjob("run", file)
    assert done.code == 100
    assert re.search(r"^tiny Failed after", done.out, re.MULTILINE)
    assert re.search(r"^why: ", done.out, re.MULTILINE)
    assert "next: " in done.out
    assert k8sjob("status", "tiny", "--exit-code").code == 100
    (finding, *_) = json.loads(k8sjob("why", "tiny", "-o", "json").out)
    assert finding["replica"] == "master-0"
    assert k8sjob("why", "tiny").out.startswith("why: ")
    assert k8sjob("watch", "tiny").code == 100


def test_another_terminal(job, k8sjob, process, tmp_path):
    running = process("run", job("wait"), "-o", "json")

    def state():
        done = k8sjob("status", "tiny", "-o", "json")
        return json.loads(done.out)["state"] if done.code == 0 else ""

    until(lambda: state() == "Running" and "rank 0" in k8sjob("logs", "tiny").out)
    assert k8sjob("status", "tiny", "--exit-code").code == 101
    header, row = until(lambda: "epoch" in (out := k8sjob("list").out) and out.splitlines())
    assert header.split()[-1] == "PROGRESS"
    assert row.endswith("   epoch 1/2  step 5/10  loss 0.5")
    assert "PROGRESS\nepoch 1/2  step 5/10  loss 0.5\n" in k8sjob("status", "tiny").out
    assert re.search(r"master-0 +Running +7 ", k8sjob("status", "tiny").out)
    assert re.search(r" 7 +team/tiny", k8sjob("list", "-o", "wide").out)
    (listed,) = json.loads(k8sjob("list", "-o", "json").out)
    assert (listed["progress"]["epoch"], listed["progress"]["loss"]) == (1, 0.5)
    again = k8sjob("run", job("wait"))
    assert again.code == 1
    assert f"local/tiny of {tmp_path} has not ended; see " in again.err

    watching = process("watch", "tiny")
    until(lambda: "rank 0" in watching.stdout.readline())
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert err == "Detached; reattach with k8sjob watch local/tiny\n"
    following = process("logs", "-f", "tiny")
    until(lambda: "rank 0" in following.stdout.readline())
    following.send_signal(signal.SIGINT)
    assert "Detached; run the same command to reattach\n" in following.communicate(timeout=60)[1]
    assert following.returncode == 130
    choice = ("-r", "master", "--save", tmp_path / "my logs")
    saving = process("logs", "-f", "tiny", *choice)
    part = tmp_path / "my logs/tiny-master-0.0.log.part"
    until(lambda: part.exists() and "rank 0" in part.read_text())
    saving.send_signal(signal.SIGINT)
    out, err = saving.communicate(timeout=60)
    assert "Detached" in err
    assert (saving.returncode, out) == (130, f"{tmp_path}/my logs/tiny-master-0.0.log\n")
    assert "rank 0" in (tmp_path / "my logs/tiny-master-0.0.log").read_text()
    assert state() == "Running"

    assert k8sjob("suspend", "tiny").out == "local/tiny is being suspended\n"
    until(lambda: state() == "Suspended")
    until(lambda: '"Suspended"' in running.stdout.readline())  # a watch may miss what was short
    assert k8sjob("resume", "tiny").out == "local/tiny is being resumed\n"
    until(lambda: state() == "Running")
    until(lambda: k8sjob("logs", "tiny").out.count("rank 0") == 2)
    watching = process("watch", "tiny")
    shown = list(takewhile(lambda line: "rank 0" not in line, watching.stdout))
    assert "resumed at" in "".join(shown), shown  # and not what the first start has written
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)

    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "after a checkpoint" not in out
    assert "--set checkpoint.dir=/checkpoints" in err
    states = [
        event["data"]["state"] for event in map(json.loads, out.splitlines())
        if event["kind"] == "job"
    ]  # fmt: skip
    assert states[-1] == "Stopped"
    assert "saved" in k8sjob("logs", "tiny").out


def test_the_live_screen_on_a_terminal(job, on_a_terminal):
    code, text = on_a_terminal("run", job("end", "replicas: {workers: 1}"))
    assert code == 0
    assert "\x1b[?2026h" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)
    assert "rank 1 [bold]here[/bold] red" in plain
    assert "tiny Succeeded after" in plain
    assert "\x1b]0;title" not in text


def test_a_record_is_read_in_place_of_its_job(job, k8sjob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    k8sjob("run", job("fail", "policy: {restart_policy: Never}"))
    reading = [("why",), ("logs", "-o", "json"), ("status", "-o", "json")]
    live = [k8sjob(command, "tiny", *options).out for command, *options in reading]
    written = k8sjob("archive", "tiny")
    assert (written.code, written.out, written.err) == (0, "tiny.k8sjob\n", "")
    assert "--force to replace it" in k8sjob("archive", "tiny").err
    assert k8sjob("archive", "tiny", "-o", "tiny.zip").code == 2
    assert "cannot be written: No such file" in k8sjob("archive", "tiny", "-o", "no/a.k8sjob").err
    assert k8sjob("delete", "tiny").code == 0
    recorded = [k8sjob(command, "tiny.k8sjob", *options).out for command, *options in reading]
    assert "logs tiny.k8sjob -r" in "".join(recorded)
    assert [text.replace("logs tiny.k8sjob", "logs tiny") for text in recorded] == live
    watched = k8sjob("watch", "tiny.k8sjob")
    assert (watched.code, "rank 0 [bold]here[/bold] red\n" in watched.out) == (100, True)
    for command in ("delete", "suspend"):
        refused = k8sjob(command, "tiny.k8sjob")
        assert (refused.code, refused.out) == (1, "")
        assert "tiny.k8sjob is the record of a job" in refused.err
    assert k8sjob("report", "tiny.k8sjob").out == "tiny.html\n"
    page = (tmp_path / "tiny.html").read_text()
    assert "why:" in page
    assert "container started" in page
    assert "rank 0 [bold]here[/bold] red" in page
    (tmp_path / "x.k8sjob").write_text("x")
    damaged = k8sjob("why", "x.k8sjob")
    assert damaged.code == 1
    assert damaged.err.startswith("error: x.k8sjob cannot be read as a record of a job: ")


def test_a_page_shows_what_others_wrote_as_text(job, k8sjob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = '</pre><script>alert("x")</script>'
    losses = [
        Event(kind, data, 1.0)
        for step, loss in enumerate((2.5, 1.25, 0.5))
        for kind, data in (
            (
                EventKind.PROGRESS,
                {"epoch": 0, "step": step, "steps": 2, "loss": loss, "memory_bytes": loss * 2**30},
            ),
            (EventKind.METRICS, {words: loss}),
        )
    ]
    lines = [words, *(loss.encode() for loss in losses)]
    file = job("end", f"annotations: {{words: {words!r}}}")
    (tmp_path / "program.py").write_text(f"print({chr(10).join(lines)!r})\n")
    assert k8sjob("run", file).code == 0
    assert k8sjob("report", "tiny", "-o", "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3  # the output, the manifest, the name of a curve
    assert "loss: 2.5 to 0.5, lowest 0.5" in page
    assert "memory_bytes: 2.5 GiB to 512 MiB, lowest 512 MiB" in page
    assert all(f">{mark}</text>" in page for mark in ("epoch 0", "1", "2.5 GiB", "512 MiB"))
    assert "<title>local/tiny · k8sjob report</title>" in page
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"src=|href=|url\(|@import", page)


def test_a_record_says_what_the_job_ran_on(job, k8sjob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = {"world_size": 4, "strategy": "ddp", "backend": "nccl", "device": "NVIDIA\x1b[2J H100"}
    versions = {"torch": "2.9.1", "python": "3.12.1", "cuda": "12.8"}
    file = job("end")
    started = Event(EventKind.STARTED, group | versions, 1.0).encode()
    (tmp_path / "program.py").write_text(f"print({started!r})\n")
    assert k8sjob("run", file).code == 0
    k8sjob("archive", "tiny")
    ran = "4 processes joined: ddp over nccl on NVIDIA H100; torch 2.9.1, Python 3.12.1, CUDA 12.8"
    assert k8sjob("why", "tiny.k8sjob").out == f"ran: {ran}\nlocal/tiny succeeded\n"
    assert k8sjob("why", "tiny").out == "local/tiny succeeded\n"
    k8sjob("report", "tiny.k8sjob")
    assert ran in (tmp_path / "tiny.html").read_text()


def test_a_file_that_cannot_be_completed_leaves_what_was_there(job, k8sjob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    k8sjob("run", job("end"))
    (tmp_path / "tiny.k8sjob").write_text("before")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("k8sjob.cli.archive.write_record", interrupted)
    before = sorted(tmp_path.iterdir())
    assert k8sjob("archive", "tiny", "--force").code == 130
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "tiny.k8sjob").read_text() == "before"


def test_a_closed_pipe_does_not_stop_the_job(tmp_path):
    """As `k8sjob run | head -1`: the job outlives the reader of its output."""
    lines = "for _ in range(20): print(1, flush=True); time.sleep(0.05)"
    program = f"import time\n{lines}\nopen({str(tmp_path / 'end')!r}, 'w')"
    command = json.dumps([sys.executable, "-c", program])
    text = f"name: x\nimage: a/b:1\nrun: {{command: {command}}}\n"
    (tmp_path / "job.yaml").write_text(text)
    argv = [sys.executable, "-m", "k8sjob", "run", str(tmp_path / "job.yaml")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(timeout=60) == 0, running.stderr.read()
    assert (tmp_path / "end").exists()


def test_what_a_script_writes_is_listed_copied_and_named_before_it_is_deleted(
    job, k8sjob, on_a_terminal, tmp_path
):
    file = job("end", "replicas: {workers: 1}")
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    open('model.pt', 'w').write(os.environ['RANK'])\n"
        "sys.exit(3 * (sys.argv[1] == 'fail'))\n"
    )
    done = k8sjob("run", file, "--copy-to", tmp_path / "results")
    (model,) = re.findall(r"^ +written +(.*/master-0/work/model.pt)$", done.out, re.MULTILINE)
    assert (tmp_path / "results/model.pt").read_text() == "0"
    assert f"copied 1 file to {tmp_path / 'results'}" in done.err
    assert model in k8sjob("status", "tiny").out.partition("WRITTEN\n")[2]
    failing = job("fail", "policy: {restart_policy: Never}")
    again = k8sjob("run", "-q", failing, "--copy-to", tmp_path / "results")
    assert again.code == 100
    assert str(tmp_path / "results/model.pt") in again.err
    assert k8sjob("run", file, "--detach", "--copy-to", tmp_path).code == 2

    for answer, code in (("n", 130), ("y", 0)):
        ended, shown = on_a_terminal("delete", "--local", "--all", typed=f"{answer}\n")
        assert (ended, model in shown) == (code, True)
        assert bool(k8sjob("list").out) == (answer == "n")
    k8sjob("run", file)
    assert "/work/model.pt" in k8sjob("delete", "tiny").err


@pytest.mark.parametrize(
    ("lines", "script", "warned"),
    [
        ([], "from k8sjob import runtime\nif 0: runtime.session()", True),
        (
            ["checkpoint: /checkpoints"],
            "from k8sjob import runtime\nif 0: runtime.session()",
            False,
        ),
        ([], "print('saves its own')", False),
    ],
)
def test_that_no_progress_is_kept_is_said_before_the_start(lines, script, warned, job_file, k8sjob):
    file = job_file(*lines)
    (file.parent / "main.py").write_text(script)
    refused = k8sjob("run", file, "--workers", 1000)
    assert ("no `checkpoint`" in refused.err) == warned
    assert "no `checkpoint`" not in k8sjob("run", "-q", file, "--workers", 1000).err
