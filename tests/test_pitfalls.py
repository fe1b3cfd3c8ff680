"""Usual mistakes (docs/hang.md) that no other test shows: each breaks something that a user would have to find out."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from harness import deviation, fetched, single_run, train
from launches import Launch
from patches import BASE, printed
from single import single, task_file
from torch import nn
from torch.utils.data import Dataset, Subset, random_split

import common
import engine.run
from sampling import GlobalBatchSampler, build_loader
from tasks.images import ImagesInMemory


def test_ranks_reduce_once_a_step(tmp_path):
    """Without no_sync DDP sends all gradients in every micro-batch."""
    argv = [*BASE, "--epochs", "1", "--accum-steps", "4"]
    result = train("ddp", 2, *argv, folder=tmp_path, patch=count_buckets)
    assert result.code == 0, result.err
    assert printed(result.out, "reduced") == [1 + 6] * 2, "once in settle_buckets, once a step"


def count_buckets(rank):
    """Print how many times DDP has sent its one bucket."""
    made, destroy, count = (
        nn.parallel.DistributedDataParallel.__init__,
        dist.destroy_process_group,
        [],
    )

    def hook(state, bucket):
        count.append(1)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def make(self, *arguments, **options):
        made(self, *arguments, **options)
        self.register_comm_hook(None, hook)

    nn.parallel.DistributedDataParallel.__init__ = make
    dist.destroy_process_group = lambda: (print("reduced", len(count)), destroy())


@pytest.mark.full
def test_two_jobs_on_one_machine(tmp_path):
    """They must not meet at one port."""
    jobs = [tmp_path / "0", tmp_path / "1"]
    for folder in jobs:
        folder.mkdir()
    command = ["bash", "run.sh", "ddp", "2", *BASE]
    with Launch(command, jobs[0]) as first, Launch([*command, "--seed", "1"], jobs[1]) as second:
        assert [first.end(), second.end()] == [0, 0], first.errors() + second.errors()
        models = [job.checkpoint()["model"] for job in (first, second)]
    assert deviation(models[0], single_run(*BASE).checkpoint()["model"]) <= 1e-10
    assert deviation(models[1], models[0]) > 1e-2, "two jobs, not twice the same"


def test_clipping_sees_the_gradient_without_the_scale_of_fp16(tmp_path):
    """Clipped before unscale_, a gradient is made 65,536 times too small."""
    argv = [*BASE, *"--dtype float32 --epochs 1 --warmup-epochs 0 --clip-grad-norm 0.5".split()]
    scaled = single(tmp_path / "fp16", *argv, "--amp", "fp16")
    plain = single(tmp_path / "off", *argv)
    assert scaled.code == plain.code == 0, scaled.err + plain.err
    lines = scaled.train_lines()
    assert lines[0]["loss_scale"] == 2**16 and lines[0]["grad_norm"] > 0.5
    assert lines[0]["grad_norm"] == pytest.approx(plain.train_lines()[0]["grad_norm"], rel=0.02)
    assert deviation(scaled.checkpoint()["model"], plain.checkpoint()["model"]) < 0.02


@pytest.mark.full
def test_unused_parameters(tmp_path):
    """ "Expected to have finished reduction": DDP waits for a gradient that does not come."""
    argv = [*BASE, "--model", "unused"]
    without = train("ddp", 2, *argv, folder=tmp_path / "without")
    assert without.code == 1 and "Expected to have finished reduction" in without.err
    result = train("ddp", 2, *argv, "--find-unused-parameters", folder=tmp_path / "with")
    reference = single_run(*argv).checkpoint()["model"]
    assert "unused.weight" in reference
    assert deviation(result.checkpoint()["model"], reference) <= 1e-10


REPLICAS = """from pit_models import *
from pit_models import per_sample_loss as loss
def per_sample_loss(outputs, targets):
    if outputs.requires_grad:
        print("replica", len(targets))
    return loss(outputs, targets)
"""


def test_replicas_compute_their_own_losses(tmp_path):
    """nn.DataParallel gathers all outputs on the first device; and the mean of uneven replicas' means is another one."""
    (tmp_path / "replicas.py").write_text(REPLICAS)
    argv = [*BASE, "--batch-size", "10", "--epochs", "1", "--lr", "0.02"]
    result = train("dp", 4, *argv, "--task", tmp_path / "replicas.py", folder=tmp_path)
    assert result.code == 0, result.err
    assert sorted(printed(result.out, "replica")) == 20 * [1] + 60 * [3]
    reference = single_run(*argv)
    assert deviation(result.gradients[0][0], reference.gradients[0][0]) <= 1e-12


def count_waits(rank):
    """Print [collectives that are waited for at once, reads of a tensor by the host] of each step."""
    waits = [0, 0]

    def count(owner, name, which):
        function = getattr(owner, name)

        def watched(*arguments, **keywords):
            waits[which] += not keywords.get("async_op")
            return function(*arguments, **keywords)

        setattr(owner, name, watched)

    for name in ("all_reduce", "broadcast", "barrier", "all_gather", "broadcast_object_list"):
        count(dist, name, 0)
    for name in ("item", "tolist", "__float__", "__bool__"):
        count(torch.Tensor, name, 1)
    batches = engine.run.Run.batches

    def watched_batches(self, loader):
        for batch in batches(self, loader):  # what is between two batches is one step
            print("waits", json.dumps(waits))
            waits[:] = 0, 0
            yield batch

    engine.run.Run.batches = watched_batches


def test_steps_wait_for_the_stop_flag_alone(tmp_path):
    argv = [*BASE, "--epochs", "1", "--log-every", "1000"]
    result = train("ddp", 1, *argv, folder=tmp_path, patch=count_waits)
    assert result.code == 0, result.err
    _, *steps = printed(result.out, "waits")  # the first is the start of the run
    assert steps == [[1, 0]] * 5


def test_one_rank_prints_and_writes(tmp_path):
    one, two = single_run(*BASE), train("ddp", 2, *BASE, folder=tmp_path)
    assert len(two.out.splitlines()) == len(one.out.splitlines()) > 18 + 3
    assert len(two.lines) == len(one.lines) == 18 + 3 and two.err == ""
    assert {path.name for path in two.folder.iterdir()} == {*os.listdir(one.folder)}


class Pids(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor(os.getpid()), 0


@pytest.mark.full
def test_loader_workers_stay_over_the_epochs():
    data = Pids()
    sampler = GlobalBatchSampler(data, 8, 0)
    loader, pids = build_loader(data, sampler, torch.device("cpu"), 0, workers=2), []
    for epoch in range(3):
        sampler.set_position(epoch, 0)
        pids.append({pid for ((batch, _),) in loader for pid in batch.tolist()})
    assert len(pids[0]) == 2 and pids[0] == pids[1] == pids[2] and os.getpid() not in pids[0]


def test_wrapped_data_set_is_augmented_anew_in_every_epoch():
    """`set_epoch` would not reach a data set behind a wrapper."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8, generator=generator)
    plain = ImagesInMemory(images, torch.arange(40), shift=1, flip=True)
    wrapped = Subset(random_split(plain, [40], generator)[0], range(40))
    first, second, again = (fetched(wrapped, epoch, [*range(40)]) for epoch in (0, 1, 0))
    assert again.equal(first)
    assert (first != second).flatten(1).any(1).double().mean() > 0.7


GROUPS = """
def build_optimizer(args, net):
    parameters = [*net.parameters()]
    if __import__("os").environ.get("REVERSED"):
        parameters.reverse()
    return torch.optim.SGD([{"params": [p]} for p in parameters], args.lr, 0.9)
"""


def test_groups_from_a_set_are_refused(tmp_path, monkeypatch):
    """State dicts number the parameters: in another order each gets another one's momentum."""
    argv = [*task_file(tmp_path, GROUPS), "--epochs", "1"]
    assert single(tmp_path, *argv).code == 0
    more = ["--epochs", "2", "--resume", "auto"]
    monkeypatch.setenv("REVERSED", "1")
    refused = single(tmp_path, *argv, *more)
    assert refused.code == 2 and "parameters in another order" in refused.err, refused.err
    monkeypatch.delenv("REVERSED")
    assert single(tmp_path, *argv, *more).code == 0


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, stored = nn.Linear(2, 2), nn.Linear(2, 1), {}
        self.body.register_forward_hook(lambda *values: stored.update(body=values[2]))
        self.stored = stored

    def forward(self, inputs):
        self.body(inputs)
        return self.head(self.stored["body"])


def test_average_of_a_model_with_closures():
    """In a copy of the model hooks would still write into the original."""
    torch.manual_seed(0)
    net, inputs = Features().requires_grad_(False), torch.ones(3, 2)
    average, right = common.WeightAverage(net, 0.9), net(inputs)
    average.after_step()
    net.body.weight += 1
    net(torch.zeros(3, 2))
    with average.swapped_in():
        assert torch.equal(net(inputs), right)
    assert not torch.equal(net(inputs), right)
