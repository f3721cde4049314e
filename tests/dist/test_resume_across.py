"""Any strategy, on any number of ranks, goes on from the checkpoint of any other."""

import json
import random
import signal
import time

import pytest

from k8sjob.contract import ExitCode

pytestmark = pytest.mark.dist

OPTIONS = {"epochs": 3, "batch": {"global_batch": 8}}
DDP = {"strategy": "ddp"}
FSDP = {"strategy": "fsdp"}
ONE_FILE = {"checkpoint_format": "full"}
PARTS = {"checkpoint_format": "sharded"}
LAYOUT = {"0.weight": ["model", None], "4.weight": [None, "model"]}
MESH = {"strategy": "mesh", "options": {"model": 2, "layout": LAYOUT}}

PIPELINE = {"strategy": "pipeline", "options": {"splits": ["4"], "micro_batches": 2}}


@pytest.fixture(scope="module")
def whole(run_once):
    return run_once(OPTIONS, world=1).result


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({**FSDP, "world": 2}, {**DDP, "world": 3}),
        ({**DDP, "world": 2}, {**FSDP, "world": 4}),
        ({**FSDP, "world": 4}, {**MESH, "world": 4}),
        ({**MESH, "world": 4}, {**PIPELINE, "world": 2}),
        ({**PIPELINE, "world": 4}, {**DDP, "world": 1}),
        ({**FSDP, "world": 2}, {**FSDP, "world": 4}),
        ({**FSDP, **ONE_FILE, "world": 4}, {**FSDP, "world": 2}),
        ({**DDP, **PARTS, "world": 2}, {**FSDP, "world": 1}),
    ],
    ids=lambda ranks: " ".join(
        [ranks["strategy"], "x", str(ranks["world"]), ranks.get("checkpoint_format", "")]
    ),
)
def test_the_curve_continues(start_ranks, tmp_path, whole, first, then):
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 5}
    killed = start_ranks({**OPTIONS, "kill": [1, 18]}, **settings, **first).finish()
    assert killed.told("checkpoint")[-1]["step"] == 15, killed.errors
    auto = "full" if first["strategy"] == "ddp" else "sharded"
    one_file = first.get("checkpoint_format", auto) == "full"
    name = "step-00000015.pt" if one_file else "step-00000015"
    assert killed.told("checkpoint")[-1]["path"] == str(tmp_path / "saved" / name)
    resumed = start_ranks(OPTIONS, restart=1, **settings, **then).finish()
    assert resumed.told("resumed")[0]["step"] == 15
    assert "random numbers (dropout, augmentation) do not" in resumed.told("warning")[0]["message"]
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    assert resumed.result["weights"] == pytest.approx(whole["weights"], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("kind", [FSDP, MESH, PIPELINE], ids=lambda kind: kind["strategy"])
def test_with_dropout_the_resumed_is_the_undisturbed_bit_by_bit(
    start_ranks, run_ranks, tmp_path, kind
):
    options = {**OPTIONS, "dropout": 0.3, "norm": True}
    undisturbed = run_ranks(options, world=2, **kind).result
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 5, **kind}
    start_ranks({**options, "kill": [1, 18]}, world=2, **settings).finish()
    resumed = run_ranks(options, world=2, restart=1, **settings)
    assert resumed.told("resumed")[0]["step"] == 15
    assert resumed.result["weights"] == undisturbed["weights"]


@pytest.mark.parametrize(("seed", "victims"), [(0, [0, 1]), (1, [1]), (2, [0])])
def test_ranks_killed_at_any_moment_go_on_from_a_whole_one(  # noqa: PLR0917 - fixtures
    start_ranks, run_ranks, tmp_path, whole, seed, victims
):
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 1, **FSDP}
    ranks = start_ranks({**OPTIONS, "pause": 0.03}, world=2, **settings)
    ranks.await_event("checkpoint")
    time.sleep(random.Random(seed).uniform(0.1, 0.6))  # most of which goes by in saves
    for rank in victims:
        ranks.signal(rank, signal.SIGKILL)
    ended = ranks.finish()
    left = {ended.codes[rank] for rank in {0, 1} - set(victims)}
    assert left <= {ExitCode.PEER_LOST}
    told = [found["step"] for found in ended.told("checkpoint")]
    resumed = run_ranks(OPTIONS, world=2, restart=1, **settings)
    assert resumed.told("resumed")[0]["step"] >= told[-1]
    assert not resumed.told("warning")
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    assert not list((tmp_path / "saved").glob(".step-*"))


def test_a_folder_that_ranks_do_not_share_is_found_out(start_ranks, run_ranks, tmp_path, whole):
    for rank in (0, 1):
        (tmp_path / f"of-{rank}").mkdir()
    settings = {
        "world": 2,
        "checkpoint_every": 5,
        "env": {"K8SJOB_CHECKPOINT_DIR": f"{tmp_path}/of-{{rank}}"},
        **FSDP,
    }
    start_ranks({**OPTIONS, "kill": [1, 18]}, **settings).finish()
    resumed = run_ranks(OPTIONS, restart=1, **settings)
    [warning] = [found["message"] for found in resumed.told("warning")]
    assert f"{tmp_path}/of-0 is not shared by all ranks: rank 0 gathers" in warning
    assert resumed.told("resumed")[0]["path"] == f"{tmp_path}/of-0/step-00000015.pt"
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    refused = start_ranks(OPTIONS, **settings, **PARTS).finish()
    assert refused.codes[0] == ExitCode.USER_ERROR
    assert "checkpoint.format: sharded, but checkpoint.dir" in refused.reasons[0]["message"]
    assert not refused.told("progress")


def test_parts_in_a_folder_of_only_rank_0_are_read_for_all(start_ranks, run_ranks, tmp_path, whole):
    settings = {"world": 2, "checkpoint_every": 5, **FSDP}
    here = str(tmp_path / "of-0")
    start_ranks({**OPTIONS, "kill": [1, 18]}, checkpoint_dir=here, **settings).finish()
    env = {"K8SJOB_CHECKPOINT_DIR": f"{tmp_path}/of-{{rank}}"}
    resumed = run_ranks(OPTIONS, restart=1, env=env, **settings)
    assert resumed.told("resumed")[0]["path"] == f"{tmp_path}/of-0/step-00000015"
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)


def test_a_part_that_is_damaged_is_found_by_the_rank_that_looks(
    start_ranks, run_ranks, tmp_path, whole
):
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 5, **FSDP}
    start_ranks({**OPTIONS, "kill": [1, 18]}, world=4, **settings).finish()
    part = tmp_path / "saved" / "step-00000015" / "__3_0.distcp"
    part.write_bytes(part.read_bytes()[:-10])
    resumed = run_ranks(OPTIONS, world=2, restart=1, **settings)
    assert "__3_0.distcp has" in resumed.told("warning")[0]["message"]
    assert resumed.told("resumed")[0]["step"] == 10
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)


@pytest.fixture(scope="module")
def undisturbed(run_once):
    return run_once({"steps": 12}, program="own_divided.py", world=2).result


class TestALoopOfOnesOwn:
    """What FSDP2 divides is saved whole, and divided again as it is wanted."""

    @pytest.mark.parametrize(
        ("form", "like", "world"),
        [("auto", True, 2), ("auto", True, 3), ("auto", False, 2), ("full", True, 3)],
    )
    def test_it_continues_as_if_nothing_had_happened(
        self, run_ranks, tmp_path, undisturbed, *, form, like, world
    ):
        saves = {"checkpoint_dir": str(tmp_path / "saves"), "checkpoint_format": form}
        run_ranks({"steps": 6}, program="own_divided.py", world=2, **saves)
        (saved,) = (tmp_path / "saves").glob("step-*")
        assert saved.is_dir() == (form == "auto")
        more = {"steps": 12, "like": like}
        resumed = run_ranks(more, program="own_divided.py", world=world, **saves)
        assert resumed.result == pytest.approx(undisturbed, abs=1e-6)
        assert [event["step"] for event in resumed.told("resumed")] == [6]

    @pytest.mark.parametrize("form", ["auto", "full"])
    def test_on_a_mesh_of_two_axes_too(self, run_ranks, tmp_path, undisturbed, form):
        saves = {"checkpoint_dir": str(tmp_path / "saves"), "checkpoint_format": form}
        for steps in (6, 12):
            options = {"steps": steps, "tensor_parallel": True}
            ranks = run_ranks(options, program="own_divided.py", world=4, **saves)
        assert ranks.result == pytest.approx(undisturbed, abs=1e-5)

    def test_so_does_one_on_folders_of_their_own(self, run_ranks, tmp_path, undisturbed):
        """Rank 0 writes the whole, which the others never see."""
        saves = {"checkpoint_dir": "/saves"}
        for steps in (6, 12):
            places = {"K8SJOB_PATHS": json.dumps({"/saves": str(tmp_path / "of-{rank}")})}
            ranks = run_ranks(
                {"steps": steps}, program="own_divided.py", world=2, env=places, **saves
            )
        assert ranks.result == pytest.approx(undisturbed, abs=1e-6)
        assert not list((tmp_path / "of-1").glob("step-*"))
