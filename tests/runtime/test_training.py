"""A session of one process, in the test's own process: the loop, its errors, its files."""

import math
import os
import platform
import random
import signal
import time
from collections import Counter, UserDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from k8sjob import runtime
from k8sjob.contract import CHECKPOINT_DIR_ENV, CONFIG_ENV, PATHS_ENV, Event, RuntimeConfig
from k8sjob.runtime import progress, recipes, stream
from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.strategies import tensor_parallel

SGD = (torch.optim.SGD, {"lr": 0.1})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("K8SJOB_", "PET_")) or name in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
            monkeypatch.delenv(name)


@pytest.fixture
def settings(monkeypatch):
    """settings(checkpoint_every=3, ...) as the job.yaml would have them."""

    def put(**config):
        monkeypatch.setenv(CONFIG_ENV, RuntimeConfig(**config).encode())

    return put


@pytest.fixture
def told(capsys):
    """told("progress"): the data of the events of a kind so far."""
    seen = []

    def events(kind):
        seen.extend(filter(None, map(Event.decode, capsys.readouterr().out.splitlines())))
        return [event.data for event in seen if event.kind == kind]

    return events


def data(count=40):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def prepare(job, build=lambda: nn.Linear(4, 2), **options):
    return job.prepare(build, **{"loss": functional.cross_entropy, "optimizer": SGD, **options})


def loop(run, *, epochs=1, dataset=None, batch_size=10, sets=1, steps=1, **options):
    """The usual loop; `sets` batches(...) an epoch and `steps` step(...) a batch are mistakes."""
    dataset = data() if dataset is None else dataset
    for _ in run.epochs(epochs):
        for _ in range(sets):
            for batch in run.batches(dataset, batch_size=batch_size, **options):
                for _ in range(steps):
                    run.step(*batch)


def train(epochs, *, stop_after=None, **options):
    """Train in a session of its own; returns the run."""
    with runtime.session() as job:
        run = prepare(job, **options)
        for _ in run.epochs(epochs):
            for inputs, targets in run.batches(data(), batch_size=10):
                run.step(inputs, targets)
                if run.steps == stop_after:
                    os.kill(os.getpid(), signal.SIGTERM)
            job.log(**run.evaluate(data()))
    return run


def test_the_time_left_has_what_comes_between_epochs(told, settings, monkeypatch):
    settings()
    clock = SimpleNamespace(now=1.0, monotonic=lambda: clock.now, thread_time=time.thread_time)
    monkeypatch.setattr(progress, "time", clock)
    with runtime.session() as job:
        run = prepare(job)
        for _ in run.epochs(3):
            for batch in run.batches(data(), batch_size=20):
                run.step(*batch)
                clock.now += 0.1
            clock.now += 30  # an evaluation
    left = {event["epoch"]: event.get("eta_s") for event in told("progress") if event["step"] == 2}
    assert left[0] < 30 <= left[1]
    assert left[2] == 0


def test_a_folder_that_can_hold_no_checkpoint_ends_it_before_the_first_step(settings, tmp_path):
    (tmp_path / "file").write_text("")
    settings(checkpoint_dir=str(tmp_path / "file/saves"))
    with runtime.session() as job:
        run = prepare(job)
        with pytest.raises(OSError, match=r"checkpoint.dir \S+ cannot be written by user \d+"):
            next(iter(run.epochs(1)))
    assert run.steps == 0


def test_it_learns_and_tells(told, settings):
    settings()
    run = train(5)
    [started] = told("started")
    assert (started["world_size"], started["backend"], started["device"]) == (1, "gloo", "cpu")
    assert 0 < started["import_s"] < 7 * 86400  # since this process was started
    assert started["torch"] == torch.__version__
    assert started["python"] == platform.python_version()
    assert "cuda" not in started
    ends = [event for event in told("progress") if event["step"] == event["steps"] == 4]
    assert [event["epoch"] for event in ends] == [0, 1, 2, 3, 4]
    assert ends[-1]["epoch_loss"] < ends[0]["epoch_loss"]
    assert {"samples_per_s", "eta_s", "loss"} <= set(ends[0])
    assert "eta_s" not in told("progress")[0]  # the first step also loads kernels
    assert ends[-1]["eta_s"] == 0
    assert [set(event) for event in told("metrics")] == [{"eval_loss", "eval_accuracy"}] * 5
    assert told("finished")[0]["eval_accuracy"] > 0.8
    assert run.steps == 20
    assert not torch.distributed.is_initialized()


def test_the_seed_decides(settings):
    settings()
    first, second = train(2).model.weight, train(2).model.weight
    assert torch.equal(first, second)
    with runtime.session(seed=9) as job:
        other = prepare(job).model.weight
        assert not torch.equal(other, nn.Linear(4, 2).weight)
    with runtime.session() as job:
        assert not torch.equal(prepare(job).model.weight, other)


def test_checkpoints_every_so_many_steps(settings, told, tmp_path):
    settings(checkpoint_dir=str(tmp_path), checkpoint_every=3, checkpoint_keep=2)
    train(2)
    assert [event["step"] for event in told("checkpoint")] == [3, 6, 8]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_finished_run_has_nothing_left(settings, told, tmp_path):
    settings(checkpoint_dir=str(tmp_path))
    train(2)
    run = train(2)
    assert "nothing is left to train" in told("warning")[-1]["message"]
    assert run.steps == 8
    assert train(3).steps == 12  # more epochs were asked for: they follow


def test_sigterm_saves_and_leaves_with_143(settings, told, tmp_path):
    settings(checkpoint_dir=str(tmp_path))
    with pytest.raises(SystemExit) as left:
        train(3, stop_after=6)
    assert left.value.code == 143
    assert told("stopping")[0] == {"signal": "SIGTERM", "epoch": 1, "step": 6}
    assert told("checkpoint")[-1]["step"] == 6
    assert told("finished") == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    run = train(3)
    undisturbed = tmp_path / "other"
    settings(checkpoint_dir=str(undisturbed))
    assert torch.equal(run.model.weight, train(3).model.weight)


def test_sigterm_in_an_evaluation_comes_back_to_it(settings, told, tmp_path):
    settings(checkpoint_dir=str(tmp_path))

    def once(stop):
        with runtime.session() as job:
            run = prepare(job)
            for epoch in run.epochs(2):
                for batch in run.batches(data(), batch_size=10):
                    run.step(*batch)
                if stop and epoch == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                job.log(epoch=epoch, **run.evaluate(data()))

    with pytest.raises(SystemExit):
        once(stop=True)
    once(stop=False)
    assert [event["epoch"] for event in told("metrics")] == [0, 1]
    assert told("resumed")[0] == {"path": str(tmp_path / "step-00000008.pt"), "epoch": 1, "step": 8}


def test_own_state_schedule_and_random_numbers_come_back(settings, tmp_path):
    settings(checkpoint_dir=str(tmp_path), checkpoint_every=2)

    def once(steps):
        with runtime.session() as job:
            run = prepare(job, scheduler=(torch.optim.lr_scheduler.StepLR, {"step_size": 1}))
            done = 0
            for _ in run.epochs(3):
                for inputs, targets in run.batches(data(), batch_size=10):
                    run.step(inputs + torch.rand(1), targets)
                    drawn = run.state.setdefault("drawn", [])
                    drawn.append([random.random(), np.random.rand(), float(torch.rand(1))])  # noqa: NPY002 - the global one
                    done += 1
                    if done == steps:
                        raise KeyError("crash")
            return run

    with pytest.raises(KeyError):
        once(steps=7)
    resumed = once(steps=None)
    settings(checkpoint_dir=str(tmp_path / "other"))
    undisturbed = once(steps=None)
    assert resumed.state["drawn"] == undisturbed.state["drawn"]
    assert resumed.scheduler.get_last_lr() == undisturbed.scheduler.get_last_lr()
    assert torch.equal(resumed.model.weight, undisturbed.model.weight)


def test_a_schedule_by_steps(settings):
    settings()
    run = train(
        2,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        schedule_by="step",
    )
    assert run.scheduler.get_last_lr() == [0.1 * 0.5**8]


def test_a_checkpoint_of_another_model_is_refused(settings, tmp_path):
    settings(checkpoint_dir=str(tmp_path))
    train(1)
    with pytest.raises(ValueError, match=r"step-00000004\.pt does not fit .* --fresh` on this"):
        train(2, build=lambda: nn.Linear(4, 3))


def test_a_disk_that_fails_later_does_not_end_the_training(settings, told, tmp_path):
    folder = tmp_path / "saves"
    settings(checkpoint_dir=str(folder))
    with runtime.session() as job:
        run = prepare(job)
        for epoch in run.epochs(2):
            for batch in run.batches(data(), batch_size=10):
                run.step(*batch)
            if epoch == 0:
                folder.rmdir()
                folder.write_text("a file")
    assert run.steps == 8
    assert "training continues" in told("warning")[0]["message"]


def test_changed_data_within_an_epoch_restart_the_epoch(settings, told, tmp_path):
    settings(checkpoint_dir=str(tmp_path))
    with pytest.raises(SystemExit):
        train(2, stop_after=2)
    with runtime.session() as job:
        run = prepare(job)
        loop(run, dataset=data(80))
    assert "epoch 0 starts again" in told("warning")[0]["message"]
    assert run.steps == 2 + 8


def test_the_loss_so_far_is_the_mean_over_the_samples(settings):
    settings()
    with runtime.session() as job:
        run = prepare(job, optimizer=(torch.optim.SGD, {"lr": 0.0}))
        assert math.isnan(run.loss)
        loop(run, batch_size=16)
        inputs, targets = data()[:]
        expected = functional.cross_entropy(run.model(inputs), targets).item()
        assert run.loss == pytest.approx(expected, rel=1e-6)
        assert run.evaluate(data(), batch_size=7)["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_no_number_is_reported_once(settings, told):
    settings()
    train(3, loss=lambda output, target: functional.cross_entropy(output, target) * math.nan)
    assert len(told("warning")) == 1
    assert "the loss is nan in epoch 1" in told("warning")[0]["message"]


def test_inputs_may_be_several(settings):
    settings()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, left, right):
            return self.layer(left * right)

    with runtime.session() as job:
        run = prepare(job, Two)
        for _ in run.epochs(1):
            for number, (inputs, targets) in enumerate(run.batches(data(), batch_size=20)):
                pair = (inputs, inputs) if number else {"left": inputs, "right": inputs}
                run.step(pair, targets)
        assert run.steps == 2


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self, metrics):
        self.judged = [*getattr(self, "judged", []), metrics]
        super().step(metrics)


@pytest.mark.parametrize(
    ("by", "settings_of", "evaluates", "number"),
    [
        ("epoch", {}, False, "loss"),
        ("epoch", {}, True, "eval_loss"),
        ("eval_accuracy", {"mode": "max"}, True, "eval_accuracy"),
        ("loss", {}, True, "loss"),
    ],
)
def test_a_plateau_is_judged_by_a_number_of_the_epoch(settings, by, settings_of, evaluates, number):
    settings()
    numbers = []
    with runtime.session() as job:
        run = prepare(job, scheduler=(Plateau, settings_of), schedule_by=by)
        for _ in run.epochs(2):
            for batch in run.batches(data(), batch_size=10):
                run.step(*batch)
            results = run.evaluate(data()) if evaluates else {}
            numbers.append({**results, "loss": run.loss}[number])
    assert run.scheduler.judged == numbers


def test_what_tutorials_pass_is_taken(settings, told):
    settings()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with runtime.session() as job:
        run = prepare(job, model, optimizer=optimizer, scheduler=schedule)
        loop(run, epochs=2, drop_last=True, batch_size=12)
    assert (run.optimizer, run.scheduler, run.steps) == (optimizer, schedule, 6)
    assert schedule.get_last_lr() == [0.025]
    assert not told("warning")


ALIEN = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ({"optimizer": ALIEN}, ValueError, r"give optimizer=\(torch.optim.SGD, \{...\}\)"),
        ({"optimizer": [SGD, SGD]}, TypeError, "for several, as of a GAN, write your own loop"),
        ({"optimizer": (torch.optim.SGD, 0.1)}, TypeError, r"give \(class, \{arguments\}\)"),
        ({"optimizer": torch.optim.LBFGS}, ValueError, "LBFGS needs the loss several times"),
        ({"scheduler": (PLATEAU, {}), "schedule_by": "step"}, ValueError, "a name of run.evaluate"),
        ({"scheduler": (PLATEAU, {"mode": "max"})}, ValueError, "eval_accuracy"),
        ({"scheduler": (PLATEAU, {}), "schedule_by": "f1"}, ValueError, "has only epoch, loss"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(settings, recipe, error, message):
    settings()
    with runtime.session() as job, pytest.raises(error, match=message):
        loop(prepare(job, **recipe))


CLASSES, UNKNOWN = {"weight": torch.ones(2)}, torch.tensor([0, -100])


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (nn.MSELoss(reduction="sum"), UNKNOWN, 'reduction="sum"'),
        (partial(functional.mse_loss, reduction="sum"), UNKNOWN, 'reduction="sum"'),
        (nn.CrossEntropyLoss(**CLASSES), UNKNOWN, "weight=class_weights"),
        (partial(functional.cross_entropy, **CLASSES), UNKNOWN, "weight=class_weights"),
        (nn.BCELoss(**CLASSES), UNKNOWN, ""),  # divides by the samples
        (partial(functional.cross_entropy, label_smoothing=0.1), UNKNOWN, "ignore_index"),
        (nn.CrossEntropyLoss(), {"labels": UNKNOWN}, ""),
    ],
)
def test_a_loss_that_depends_on_the_ranks_is_told(loss, target, message):
    remark = recipes.loss_remark(loss, (target,))
    assert message in remark if message else not remark


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"text": ["a", "b"], "labels": torch.ones(2, 3)}, 2),
        (UserDict(text=["a"], labels=torch.ones(4)), 4),
        ([[], torch.ones(5)], 5),
        (["a", "b"], 1),
        (torch.ones(()), 1),
    ],
)
def test_the_samples_of_a_ready_batch(batch, count):
    assert stream.samples_in(batch) == count


def shares_of(mesh, source, options, done=0, length=1, **settings):
    """What a rank of a stream is given: the batches and their numbers of samples."""
    settings = {"sharded": True, "drops": False, "seed": 3} | settings
    options = {"batch_size": 2, "global_batch": None, **options}
    feed = stream.StreamFeed(source, mesh, options, **settings)
    windows = feed.windows(done, length)
    return [(batch.tolist(), shard.count) for window in windows for shard, batch in window]


def test_a_rank_without_more_samples_resumes_with_one_of_before():
    rows = iter([[[0.0, 0.0, 0.0], [1.0, 0.0, 2.0]], [[0.0] * 3] * 2])
    longer = SimpleNamespace(table=lambda _mine: next(rows))
    mesh = SimpleNamespace(data_rank=0, data_size=2, model_size=1, group=longer)
    assert shares_of(mesh, iter(torch.arange(4)), {}, done=2) == [([2, 3], 0)]


def test_workers_divide_a_plain_iterable_of_one_rank():
    alone = SimpleNamespace(table=lambda own: [own])
    mesh = SimpleNamespace(data_rank=0, data_size=1, model_size=1, group=alone)
    given = shares_of(mesh, list(torch.arange(6)), {"num_workers": 2})
    assert given == [([0, 1], 2), ([2, 3], 2), ([4, 5], 2)]


@pytest.mark.parametrize("weight", [None, 3])
def test_a_stream_resumes_within_an_epoch(settings, tmp_path, weight):
    def train(stop_after):
        with runtime.session() as job:
            run = prepare(job)
            for _ in run.epochs(2):
                for batch in run.batches(iter(data()), global_batch=10):
                    run.step(*batch, weight=weight)
                    if run.steps == stop_after:
                        os.kill(os.getpid(), signal.SIGTERM)
        return run

    settings(checkpoint_dir=str(tmp_path / "saves"))
    with pytest.raises(SystemExit):
        train(6)
    resumed = train(0)
    settings(checkpoint_dir=str(tmp_path / "other"))
    undisturbed = train(0)
    assert resumed.steps == undisturbed.steps == 8
    assert torch.equal(resumed.model.weight, undisturbed.model.weight)
    assert resumed.loss == pytest.approx(undisturbed.loss, rel=1e-6)


def test_a_stream_tells_where_its_epochs_end(settings, told):
    settings()
    with runtime.session() as job:
        run = prepare(job)
        for _ in run.epochs(2):
            for batch in run.batches(iter(data()), batch_size=10):
                run.step(*batch)
    ends = [(e["epoch"], e["step"]) for e in told("progress") if "epoch_loss" in e]
    assert ends == [(0, 4), (1, 4)]


@pytest.mark.parametrize("saves", [False, True])
def test_a_second_run_that_cannot_be_right_is_refused(settings, tmp_path, saves):
    settings(**({"checkpoint_dir": str(tmp_path)} if saves else {}))
    with runtime.session() as job:
        loop(prepare(job))
        if not saves:
            loop(prepare(job))  # one after the other is right
            prepare(job)
        with pytest.raises(ValueError, match="models that train together, as of a GAN, write your"):
            prepare(job)


def test_a_batch_of_no_weight_changes_nothing(settings):
    def masked(output, target, mask):
        return (
            functional.cross_entropy(output, target, reduction="none") * mask
        ).sum() / mask.sum()

    settings()
    with runtime.session() as job:
        run, weights = prepare(job, loss=masked, optimizer=torch.optim.SGD), []
        for _ in run.epochs(1):
            for number, batch in enumerate(run.batches(data(), batch_size=10)):
                mask = torch.full((10,), float(number % 2))
                run.step(*batch, mask, weight=mask.sum())
                weights.append(run.model.weight.detach().clone())
    assert weights[3].isfinite().all()
    assert torch.equal(weights[1], weights[2])


def two_loops(run):
    next(run.epochs(1))
    next(run.epochs(1))


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (
            lambda run: run.step(torch.ones(1, 4), torch.ones(1)),
            RuntimeError,
            r"run.batches\(my_batches\(\), sharded=True\)",
        ),
        (lambda run: next(run.batches(data(), batch_size=1)), RuntimeError, "inside `for epoch"),
        (lambda run: next(run.epochs(0)), ValueError, "at least one"),
        (partial(loop, steps=0), RuntimeError, "was not given to run.step"),
        (partial(loop, steps=2), RuntimeError, "once for each batch"),
        (two_loops, RuntimeError, "called before"),
        (partial(loop, sets=0), RuntimeError, r"run.epochs\(1\) ended without one optimizer step"),
        (partial(loop, sets=2), RuntimeError, "called before in epoch 0"),
        (
            partial(loop, dataset=torch.utils.data.DataLoader(data())),
            TypeError,
            "give it loader.dataset",
        ),
        (partial(loop, sampler=iter(range(8))), TypeError, "it has no length; give it __len__"),
    ],
)
def test_misuse_is_reported(settings, misuse, error, message):
    settings()
    with runtime.session() as job, pytest.raises(error, match=message):
        misuse(prepare(job))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"build": nn.ReLU}, ValueError, "ReLU has no parameters to train"),
        ({"build": lambda: 3}, TypeError, "returned a int"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, ValueError, r"the shape \(10,\)"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(settings, options, error, message):
    settings()
    with pytest.raises(error, match=message):
        train(1, **options)
    assert not torch.distributed.is_initialized()  # a notebook can try again


def test_batch_norm_needs_a_sample_on_every_rank(settings):
    from k8sjob.runtime.data import Feed

    settings()
    with runtime.session() as job:
        run = prepare(job, lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
        feed = Feed(
            data(41),
            {"batch_size": 10, "tail": "short", "loader_options": {}},
            rank=0,
            world_size=4,
            accumulate=1,
            seed=0,
            on_gpu=False,
        )
        with pytest.raises(ValueError, match="batch normalization"):
            run._begin_epoch(feed)


def test_paths_of_the_job_are_mapped(monkeypatch, tmp_path):
    monkeypatch.setenv(PATHS_ENV, f'{{"/data": "{tmp_path}", "/data/deep": "/elsewhere"}}')
    with runtime.session() as job:
        assert job.path("/data/images") == tmp_path / "images"
        assert str(job.path("/data/deep/er")) == "/elsewhere/er"
        assert str(job.path("/database")) == "/database"
        assert job.checkpoint_dir is None


def test_a_loop_of_ones_own_saves_and_loads(monkeypatch, told, tmp_path):
    monkeypatch.setenv(CHECKPOINT_DIR_ENV, str(tmp_path))
    with runtime.session() as job:
        assert job.load() is None
        job.save(3, {"weights": torch.ones(2), "epoch": 1})
        assert not job.should_stop()
    with runtime.session() as job:
        state = job.load()
        assert state["epoch"] == 1
        job._context.stop_coordinator.request("SIGTERM")
        assert job.should_stop()
    with pytest.raises(ValueError, match="holds 'k8sjob/own/1', not 'k8sjob/run/1'"):
        train(1)


def test_what_is_saved_is_what_the_loop_had_then(monkeypatch, told, tmp_path):
    monkeypatch.setenv(CHECKPOINT_DIR_ENV, str(tmp_path))
    model = torch.nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters()), [2, 5])
    with runtime.session() as job:
        before = model.weight.detach().clone()
        # A state_dict() is an OrderedDict of the very parameters, and milestones are a Counter.
        job.save(1, {"model": model.state_dict(), "scheduler": scheduler.state_dict()})
        with torch.no_grad():
            model.weight.fill_(7)
        job._context.checkpointer.settle()
        state = job.load()
    assert torch.equal(state["model"]["weight"], before)
    assert state["scheduler"]["milestones"] == Counter([2, 5])
    scheduler.load_state_dict(state["scheduler"])
    model.load_state_dict(state["model"])


def test_a_loop_that_lost_a_rank_waits_for_no_save_of_its(monkeypatch, told, tmp_path):
    monkeypatch.setenv(CHECKPOINT_DIR_ENV, str(tmp_path))
    waited = []

    def lose(*_):
        raise PeerLost("rank 1 is gone")

    def train_once():
        with runtime.session() as job:
            run = job.prepare(lambda: nn.Linear(2, 1), loss=functional.mse_loss, optimizer=SGD)
            for _ in run.epochs(1):
                settle = lambda patience=None: waited.append(patience)  # noqa: E731
                monkeypatch.setattr(job._context.checkpointer, "settle", settle)
                monkeypatch.setattr(run, "_save", lose)

    with pytest.raises(PeerLost):
        train_once()
    assert waited[0] is not None, "the first wait has an end"


def test_saving_needs_a_place():
    with (
        runtime.session() as job,
        pytest.raises(ValueError, match=r"job.save\(\) needs checkpoint.dir"),
    ):
        job.save(1, {})


def test_reducing_alone():
    with runtime.session() as job:
        assert job.reduce(loss=(6, 4), hits=(torch.tensor(3), 0)) == pytest.approx(
            {"loss": 1.5, "hits": math.nan}, nan_ok=True
        )
        with job.main_first():
            assert job.is_main
        job.barrier()


def test_one_session_at_a_time():
    with runtime.session():
        inner = runtime.session()
        with pytest.raises(RuntimeError, match="a process group already exists"):
            inner.__enter__()


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for its GPU: a tensor's number that it reads."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "mesh"])
def test_no_step_between_two_reports_waits_for_the_device(kind, weighted, settings):
    settings(strategy=kind, options={"clip_norm": 1.0})
    reads = {True: [], False: []}
    with runtime.session() as job:
        run = job.prepare(nn.Linear(4, 2), loss=functional.cross_entropy, optimizer=SGD)
        for _ in run.epochs(1):
            for inputs, labels in run.batches(data(120), batch_size=4):
                due = run._progress.due
                with Reads() as mode:
                    run.step(inputs, labels, weight=4.0 if weighted else None)
                reads[due].append(mode.count)
    assert set(reads[False]) == {0}
    assert all(reads[True])


class OwnAdam(torch.optim.AdamW):
    """An optimizer of which nobody knows what it keeps in its groups."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnAdam])
def test_no_list_of_an_optimizer_mixes_divided_and_plain_parameters(kind):
    values = [torch.arange(4.0), torch.ones(4)]
    expected = [nn.Parameter(value.clone()) for value in values]
    with runtime.session():
        ranks = init_device_mesh("cpu", (1,))
        divided = distribute_tensor(values[0].clone(), ranks, [Shard(0)])
        mixed = [nn.Parameter(divided), nn.Parameter(values[1].clone())]
        both = [kind(each, lr=0.1, fused=True) for each in (expected, mixed)]
        tensor_parallel._step_by_kind(both[1])
        both[1].load_state_dict(both[1].state_dict())
        for optimizer in both * 2:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = parameter.detach() + 1
            optimizer.step()
        assert torch.allclose(mixed[0].full_tensor(), expected[0])
        assert torch.allclose(mixed[1], expected[1])
    assert [len(group["params"]) for group in both[1].param_groups] == [2]
