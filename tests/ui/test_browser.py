"""The page in a real browser: what it shows, by keyboard alone, narrow and wide, light and dark."""

import base64
import math
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from inmemory import JobsInMemory
from trainings import pod
from ui.conftest import TOKEN, job

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.record import RecordBackend, write_record
from k8sjob.contract import Event, EventKind
from k8sjob.targets.jobs import job_of

pytestmark = pytest.mark.system
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: make .venv/.dev")
PICTURE = Path(__file__).resolve().parents[2] / "docs/images/ui.png"
MARKUP = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def driver():
    chromium, chromedriver = map(shutil.which, ("chromium", "chromedriver"))
    if not (chromium and chromedriver):
        pytest.skip("needs Debian's chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield made
    made.quit()


class Screen:
    """The browser, as a person uses it."""

    def __init__(self, driver, width, *, dark, pictures):
        self._driver, self._width, self._pictures = driver, width, pictures
        self.resize(1000)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def resize(self, height):
        size = {"width": self._width, "height": height, "deviceScaleFactor": 1}
        self._driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**size, "mobile": self._width < 600}
        )

    def open(self, client):
        self._driver.get("about:blank")
        self._driver.get(f"http://127.0.0.1:{client.port}/#token={TOKEN}")
        self.see("Jobs")

    def go(self, fragment):
        self.run(f"location.hash = {fragment!r}")

    def open_job(self, client, name):
        self.open(client)
        self.go(f"#/job/local:uid-{name}")

    def run(self, script):
        return self._driver.execute_script(script)

    @property
    def text(self):
        return self.run("return document.body.innerText")

    def see(self, *texts, absent=()):
        """Wait until the page shows these texts, and none of the others."""
        from selenium.common.exceptions import TimeoutException
        from selenium.webdriver.support.ui import WebDriverWait

        def shown(_driver):
            return all(text in self.text for text in texts) and not any(
                text in self.text for text in absent
            )

        try:
            WebDriverWait(self._driver, 15, 0.1).until(shown)
        except TimeoutException:
            pytest.fail(f"{texts} without {absent} is not shown, but: {self.text}")

    def wait(self, script):
        """Wait until a script returns something that is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self._driver, 15, 0.1).until(lambda _driver: self.run(script))

    def press(self, *keys):
        """Press keys, wherever the focus is; names of selenium's Keys or characters."""
        from selenium.webdriver import ActionChains, Keys

        for key in keys:
            ActionChains(self._driver).send_keys(getattr(Keys, key, key)).perform()

    def tab_to(self, label):
        """Press Tab until the focused element has this text or label."""
        named = (
            "const e = document.activeElement;"
            " return (e.ariaLabel || e.innerText || e.placeholder || '').trim()"
        )
        for _ in range(60):
            self.press("TAB")
            if self.run(named) == label:
                visible = "return getComputedStyle(document.activeElement).outlineStyle"
                assert self.run(visible) != "none"
                return
        pytest.fail(f"Tab never reaches {label!r}")

    def overflow(self):
        """Pixels by which the page is wider than the screen."""
        return self.run("return document.documentElement.scrollWidth - innerWidth")

    def errors(self):
        return [one["message"] for one in self._driver.get_log("browser")]

    def picture(self, file, height):
        """Write the screen as a picture of the documentation, if pytest has --regenerate."""
        if self._pictures:
            self.resize(height)
            shot = self._driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            file.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture
def screen(driver, pytestconfig):
    def make(width=1400, *, dark=False):
        pictures = pytestconfig.getoption("regenerate")
        return Screen(driver, width, dark=dark, pictures=pictures)

    yield make
    driver.get("about:blank")  # so that nothing is asked of a server that ends
    severe = [text for text in make().errors() if "favicon" not in text]
    driver.get("about:blank")  # the server ends now, and the page would miss it in the next test
    assert severe == []  # no script failed, and nothing broke the policy


def train(backend, name, epochs=range(12), rate=1.0):
    """The events of a training, an epoch a minute."""
    group = {"world_size": 4, "strategy": "ddp", "device": "cuda"}
    events = []
    if 0 in epochs:
        events.append(Event(EventKind.STARTING, {"phase": "python"}, backend.began - 30))
        events.append(Event(EventKind.STARTED, group, backend.began - 20))
    for epoch in epochs:
        at = backend.began + 60.0 * epoch
        loss = 2.3 * math.exp(-rate * epoch / 4) + 0.05 + 0.03 * math.sin(7 * epoch)
        numbers = {"epoch": epoch, "epochs": 20, "step": 100, "steps": 100, "loss": loss}
        numbers |= {"samples_per_s": 8100 + 90 * math.sin(epoch), "step_s": 0.11, "wait_s": 0.02}
        numbers |= {"grad_norm": loss / 2, "memory_bytes": 31 << 30, "slowest": 3, "eta_s": 5400.0}
        events.append(Event(EventKind.PROGRESS, {**numbers, "epoch_loss": loss + 0.05}, at))
        accuracy = 1 - 0.6 * math.exp(-rate * epoch / 3)
        events.append(Event(EventKind.METRICS, {"test_accuracy": accuracy}, at + 1))
    backend.write(name, *events)


@pytest.fixture
def jobs():
    backend = JobsInMemory(
        digits=job("digits", minutes=13),
        other=job("other", "Succeeded", labels={"team": "red"}),
        broken=job(
            "broken", "Failed", "the limit of restarts is reached", labels={"team": "redder"}
        ),
    )
    backend.began = round(time.time()) - 700
    train(backend, "digits")
    train(backend, "other", rate=0.6)
    backend.write("broken", "first line", f"second {MARKUP}", "ValueError: the batch is empty")
    nodes = {"master-0": "gpu-node-1", "worker-0": "gpu-node-2"}
    backend.pods["digits"] = [pod(replica, 0, node=node) for replica, node in nodes.items()]
    ended = {"exitCode": 1, "reason": "Error", "message": f"ValueError: {MARKUP}"}
    containers = [{"name": "pytorch", "state": {"terminated": ended}}]
    failed = {"status": {"phase": "Failed", "containerStatuses": containers}}
    backend.pods["broken"] = [pod("master-0", 0) | failed]
    return backend


def test_by_keyboard_from_the_list_to_a_deletion(serve, screen, jobs):
    page = screen()
    page.open(serve(jobs))
    page.see("3 jobs", "digits", f"master-0: exit code 1: ValueError: {MARKUP}", "live")
    assert page.run("return document.querySelectorAll('img, main script').length") == 0
    assert TOKEN not in page.run("return location.href")
    page.press("/", *"brok")
    page.see("1 of 3 jobs", absent=("digits",))
    page.tab_to("broken")
    page.press("ENTER")
    page.see("Failed", "Why", "Next", "ended")
    page.tab_to("Delete")
    page.press("ENTER")
    page.see("Delete broken?", "its checkpoints remain")
    page.press("ESCAPE")
    page.see("Delete", absent=("Delete broken?",))
    assert jobs.asked == []
    page.tab_to("Delete")
    page.press("ENTER")
    page.see("Delete broken?")
    page.tab_to("Delete")
    page.press("ENTER")
    page.see("team/broken deleted", "Jobs")
    assert jobs.asked == [("delete", "broken")]
    page.press("/", *["BACKSPACE"] * 4)
    page.see("2 jobs", absent=("brok",))


def test_labels_filter_ages_group_and_a_phone_can_sort(serve, screen, jobs):
    jobs.there["before"] = job("before", minutes=60 * 24 * 30)
    page = screen(400)
    page.open(serve(jobs))
    page.see("4 jobs", "Older\nbefore", "epoch 12/20  step 100/100")
    line = "return document.querySelector('[data-key$=digits] polyline').getAttribute('points')"
    assert page.run(line).startswith("0.0,0.0 ")
    page.tab_to("Sort by")
    page.press("HOME")  # Name
    page.see("4 jobs", absent=("Older",))
    names = "return [...document.querySelectorAll('.jobs td a')].map((link) => link.innerText)"
    assert page.run(names) == ["before", "broken", "digits", "other"]
    assert page.overflow() <= 0
    page.tab_to("team=red")
    page.press("ENTER")
    page.see("1 of 4 jobs", absent=("digits", "broken"))


def test_the_output_is_searched_and_never_markup(serve, screen, jobs):
    page = screen()
    page.open_job(serve(jobs), "broken")
    page.see("first line", f"second {MARKUP}", f"ValueError: {MARKUP}")
    assert page.run("return document.title") == "team/broken · k8sjob"
    assert page.run("return document.querySelectorAll('img, main script').length") == 0
    page.tab_to("Search the output")
    page.press(*"SECOND")
    page.see("1 line", absent=("first line",))
    assert page.run("return document.querySelector('.log mark').innerText") == "second"


def test_all_lines_are_searched_and_the_first_error_is_shown(serve, screen, jobs):
    trace = ["Traceback (most recent call last):", '  File "train.py"', "KeyError: 1", "done"]
    jobs.write("broken", *trace, *(f"step {number}" for number in range(30000)))
    page = screen()
    page.open_job(serve(jobs), "broken")
    page.see("step 29999", "28,007 lines before these are not shown", absent=("first line",))
    page.tab_to("Search the output")
    page.press(*"ey")
    page.see("1 line", "KeyError")
    page.run("document.querySelector('.log').previousSibling.querySelector('button').click()")
    assert page.run("return document.activeElement.className") == "line error"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1400, 400])
def test_a_running_job(serve, screen, jobs, width, dark):
    page = screen(width, dark=dark)
    page.open(serve(jobs))
    page.see("digits")
    assert page.overflow() <= 0
    page.go("#/job/local:uid-digits")
    page.see("12 of 20", "gradient norm", "31.0 GiB", "3 (others wait 18 %)", "gpu-node-2")
    page.see("pulling", "% waiting)", "4 ranks on 2 nodes: 4 Running; rank 3 is the slowest")
    page.see("loss", "test_accuracy", "samples/s", "live")
    assert page.overflow() <= 0
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    described = "return [...document.querySelectorAll('figure')].map((f) => f.ariaLabel)"
    assert "test_accuracy: last test_accuracy 0.9847" in page.run(described)
    drawn = "return [...document.querySelectorAll('canvas')].every((c) => c.width > 200)"
    assert page.run(drawn)
    train(jobs, "digits", epochs=[12])
    page.see("13 of 20")
    if (width, dark) == (1400, False):
        page.picture(PICTURE, 900)


def test_one_cursor_and_zoom_for_all_curves_and_their_numbers_as_csv(serve, screen, jobs):
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("loss, mean of the epoch: 0.277")
    page.run("document.querySelector('.plot').focus()")
    page.press("ARROW_LEFT", "ARROW_LEFT")
    legends = "return [...document.querySelectorAll('.legend')].map((l) => l.innerText)"
    assert all("epoch 10" in text for text in page.run(legends))
    module = "import('/static/chart.js')"
    page.run(
        "const make = URL.createObjectURL;"
        " URL.createObjectURL = (blob) => { blob.text().then((text) => { window.csv = text; });"
        " return make(blob); };"
        " document.querySelector('[aria-label^=Download]').click();"
        f" {module}.then((m) => {{ window.computed = [m.smoothed([2, 2, null, 5], 0.5),"
        " m.tickTexts([708.5, 708.75, 709].map((x) => x * 2 ** 20), 'memory_bytes')]; });"
    )
    page.wait("return window.csv && window.computed")
    assert page.run("return csv").startswith("name,epoch,step,time,value\n")
    last = datetime.fromtimestamp(jobs.began + 661, UTC)
    assert f'"epoch_loss",12,1200,{last:%Y-%m-%dT%H:%M:%S}' in page.run("return csv")
    average, ticks = page.run("return computed")
    assert average == [2, 2, None, pytest.approx((5 + 2 * 0.5 + 2 * 0.25) / 1.75)]
    assert ticks == ["708.50 MiB", "708.75 MiB", "709.00 MiB"]


def test_jobs_side_by_side(serve, screen, jobs):
    jobs.write("other", Event(EventKind.METRICS, {"test_accuracy": math.nan}, 900.0))
    page = screen()
    page.open(serve(jobs))
    for name in ("digits", "other"):
        page.tab_to(f"Compare {name}")
        page.press("SPACE")
    page.tab_to("Compare")
    page.press("ENTER")
    page.see("Comparison", "digits@uid-digi", "other@uid-othe", "state ≠", "★ best")
    page.tab_to("Differences of the manifests from digits@uid-digi")
    page.press("ENTER")
    page.see("+    team: red")
    page.see("test_accuracy ≠", "not finite", absent=("Loading",))


def test_a_server_that_ends_is_noticed_and_a_token_that_is_wrong(serve, screen, jobs, driver):
    page = screen()
    client = serve(jobs)
    driver.get(f"http://127.0.0.1:{client.port}/#token=wrong")
    page.see("the token is missing; open the address that `k8sjob ui` printed")
    assert page.errors()  # the browser reports the refusal itself
    page.open(client)
    page.see("live")
    client.end()
    page.see("k8sjob ui does not respond; is it still running?")
    page.errors()


REACH = """
const [base, done] = arguments, got = {};
const asked = (make) => new Promise((answer) => {
  const asks = make();
  asks.onload = asks.onopen = () => answer("reached");
  asks.onerror = () => answer("refused");
  if (asks instanceof HTMLElement) document.body.append(asks);
});
const tag = (name, path) => Object.assign(document.createElement(name), {src: base + path});
const get = (path, how) => fetch(base + path, how).then(() => "reached", () => "refused");
(async () => {
  got.read = await get("/api/compare", {});
  got.change = await get("/api/jobs/local:uid-digits/delete", {method: "POST", mode: "no-cors"});
  got.script = await asked(() => tag("script", "/static/main.js"));
  got.image = await asked(() => tag("img", "/static/icon.svg"));
  got.stream = await asked(() => new EventSource(base + "/api/events"));
  got.socket = await asked(() => new WebSocket(base.replace("http", "ws") + "/api/events"));
  done(got);
})();
"""


def test_another_page_of_the_browser_reaches_nothing(serve, screen, jobs, driver):
    page, client, other = screen(), serve(jobs), serve(JobsInMemory())
    page.open(client)
    assert TOKEN not in driver.current_url
    own = f"http://127.0.0.1:{client.port}"
    # The pages have no policy of their own; that of k8sjob would refuse these requests itself.
    driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        for address in (f"http://127.0.0.1:{other.port}/", "data:text/html,<body></body>"):
            driver.get(address)
            assert set(driver.execute_async_script(REACH, own).values()) == {"refused"}
        driver.get(own)
        assert driver.execute_async_script(REACH, own)["image"] == "reached"
    finally:
        driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    assert jobs.asked == []
    page.errors()


def test_an_address_with_a_broken_escape_is_the_list(serve, screen, jobs):
    page = screen()
    page.open(serve(jobs))
    page.see("digits")
    page.go("#/job/local:uid-digits")
    page.see("12 of 20")
    page.go("#/%")
    page.see("3 jobs", absent=("12 of 20",))


def test_what_a_job_is_made_of_is_read_when_it_is_requested(serve, screen, jobs):
    jobs.there["other"]["status"]["completionTime"] = "2026-01-02T03:04:05Z"
    page = screen()
    page.open_job(serve(jobs), "other")
    ended = datetime.fromisoformat("2026-01-02T03:04:05+00:00")
    page.see("Succeeded", "ended", f"{ended.astimezone():%H:%M:%S} Succeeded")
    for title, text in (
        ("Run", "image"),
        ("Time to the first step", "unknown"),
        ("Manifest", "kind: PyTorchJob"),
    ):
        page.tab_to(title)
        page.press("ENTER")
        page.see(text)


def test_numbers_of_any_name_and_type(serve, screen, jobs):
    names = ("__proto__", "constructor", "toString", "", "state", MARKUP)
    for step in range(1, 4):
        odd = {"list": [1], "dict": {"a": 1}, "none": None, **dict.fromkeys(names, step)}
        numbers = {"epoch": 0, "epochs": "x", "step": step, "steps": 4, "loss": 0.5, **odd}
        jobs.write("broken", Event(EventKind.PROGRESS, numbers, 1.0 * step))
        jobs.write("broken", Event(EventKind.METRICS, odd, 1.0 * step))
    many = {f"m{number}": number for number in range(2000)}
    jobs.write("other", *(Event(EventKind.METRICS, many, 2.0) for _ in range(2)))
    page = screen()
    page.open_job(serve(jobs), "broken")
    page.see("constructor", "toString", "loss", absent=("[native code]", "[object Object]"))
    page.go("#/compare/local:uid-broken,local:uid-other")
    page.see("Comparison", "state ≠", "constructor ≠", absent=("[native code]", "Loading"))
    assert page.run("return document.querySelectorAll('figure').length") <= 60


def test_numbers_of_a_script_without_epochs_have_curves(serve, screen, jobs):
    jobs.write("broken", *(Event(EventKind.METRICS, {"score": n}, 1.0 + n) for n in range(4)))
    jobs.there["plain"] = job("plain")
    jobs.write("plain", Event(EventKind.STARTED, {"world_size": 2}, time.time()))
    page = screen()
    page.open_job(serve(jobs), "broken")
    page.see("score")
    assert page.run("return document.querySelector('figure').ariaLabel") == "score: last score 3"
    page.go("#/job/local:uid-plain")
    page.see("first step")
    jobs.write("plain", Event(EventKind.METRICS, {"score": 1.0}, time.time()))
    page.wait("return document.querySelector('.key.phase-running')")


def test_who_scrolls_up_by_keys_reads_on_while_lines_come(serve, screen, jobs):
    jobs.write("digits", *(f"line {number}" for number in range(300)))
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("12 of 20")
    page.see("Timeline")
    page.tab_to("Output")  # which scrolls to it: what is off the screen is not rendered
    page.see("line 299")
    page.press("PAGE_UP", "PAGE_UP")
    # The browser reports a scroll with its next frame; lines that come before are followed.
    page.wait("return ![...document.querySelectorAll('.row input')].at(-1).checked")
    jobs.write("digits", "more lines")
    train(jobs, "digits", epochs=[12])
    page.see("13 of 20", absent=("more lines",))
    page.press("END")
    page.see("more lines")


def test_a_larger_window_does_not_end_following(serve, screen, jobs):
    jobs.write("digits", *(f"line {number}" for number in range(300)))
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("Timeline")
    page.tab_to("Output")
    page.see("line 299")
    page.resize(1600)
    jobs.write("digits", "more lines")
    page.see("more lines")
    assert page.run("return [...document.querySelectorAll('.row input')].at(-1).checked")


def test_the_focus_stays_in_the_row_of_a_job_that_changes(serve, screen, jobs):
    page = screen()
    page.open(serve(jobs))
    page.see("digits")
    page.tab_to("digits")
    jobs.there["digits"] = job("digits", "Failed", "the node is gone")
    page.see("the node is gone")
    assert page.run("return document.activeElement.innerText") == "digits"


def test_a_stalled_job_has_a_badge_and_the_clock_of_a_suspended_one_stands_still(
    serve, screen, jobs
):
    hang = {"reason": "no-progress", "message": "no step for 480 s", "rank": 3}
    jobs.write("digits", Event(EventKind.WARNING, hang, jobs.began + 665))
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("stalled", "no step for 480 s")
    suspended = job("digits", "Suspended", minutes=25)
    began = datetime.fromisoformat(suspended["status"]["startTime"])
    since = began + timedelta(minutes=20)
    suspended["status"]["conditions"][0]["lastTransitionTime"] = since.isoformat()
    jobs.there["digits"] = suspended
    at = f"{since.astimezone():%H:%M:%S} Suspended"
    page.see("ran for 20 min 0 s", at, "These numbers are", absent=("stalled",))
    page.open_job(serve(jobs), "broken")
    page.see("Failed", "Timeline", absent=("These numbers",))
    assert page.run("return document.querySelector('.tiles').hidden")


def test_a_job_that_was_deleted_elsewhere(serve, screen, jobs):
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("12 of 20", "Delete")
    del jobs.there["digits"]
    page.see("Deleted", "ended", absent=("Suspend",))
    assert page.run("return document.querySelectorAll('.actions :not([hidden])').length") == 0


def test_a_replica_that_was_chosen_before_its_first_line(serve, screen, jobs):
    page = screen()
    page.open_job(serve(jobs), "digits")
    page.see("12 of 20")
    page.tab_to("Replica")
    page.press("ARROW_DOWN")
    jobs.write("digits", "a first line")
    page.see("a first line")


def test_a_job_of_a_thousand_replicas_whose_loss_is_nan(serve, screen, jobs):
    big = jobs.there["big"] = job("big", "Failed")
    big["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 999
    names = ["master-0", *(f"worker-{number}" for number in range(999))]
    jobs.pods["big"] = [pod(name, 0, 60) for name in names]
    failed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    jobs.pods["big"][500]["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "pytorch", "state": failed}],
    }
    for step, loss in ((1, 0.5), (2, 0.4), (3, math.nan)):
        numbers = {"epoch": 0, "step": step, "loss": loss}
        jobs.write("big", Event(EventKind.PROGRESS, numbers, 1.0 * step))
        jobs.write("big", Event(EventKind.METRICS, {"val_loss": loss}, 1.0 * step))
    page = screen(400)
    page.open_job(serve(jobs), "big")
    page.see("worker-998", "OOMKilled", "not finite")
    tables = "return [...document.querySelectorAll('table')].map((t) => t.ariaLabel)"
    assert "Replicas" in page.run(tables)
    rows = "return [...document.querySelectorAll('.scroll tbody tr')].map((r) => r.innerText)"
    assert page.run(rows)[0].startswith("worker-499\tFailed")
    assert len(page.run(rows)) == 100
    page.see(
        "900 more replicas are not shown", "1,000 ranks on 1,000 nodes: 999 Succeeded, 1 Failed"
    )
    page.run("document.querySelector('.ranks').focus()")
    page.press("END")
    page.see("rank 999 · worker-998 on node-worker-998 · Succeeded")
    assert page.run("return document.documentElement.scrollHeight") < 4000
    tiles = "return [...document.querySelectorAll('.tile')].map((t) => t.innerText)"
    best = "best val_loss\n0.4\nlast not finite"
    assert page.run(tiles)[:3] == ["epoch\n1", "loss\nnot finite", best]


def test_the_record_of_a_running_job_ends_when_it_was_written(serve, screen, jobs, tmp_path):
    began = datetime.fromisoformat(jobs.there["digits"]["status"]["startTime"])
    with (tmp_path / "x.k8sjob").open("wb") as out:
        seen = Snapshot(job_of(jobs.there["digits"]), at=began + timedelta(minutes=3, seconds=5))
        write_record(jobs, JobRef.of(seen.job), out, print, snapshot=seen)
    page, record = screen(), RecordBackend(tmp_path / "x.k8sjob")
    client = serve(records=[record])
    page.open(client)
    page.see("3 min 5 s")
    page.go("#/job/record-0%3Auid-digits")
    page.see("running for 3 min 5 s", "12 of 20", "that had not ended", "test_accuracy")
