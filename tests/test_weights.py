"""The weights that training starts from: seeds, files from elsewhere, frozen parts."""

import os
import re

import pytest
import torch
from harness import TASKS, check, deviation, make_args, single_run, train
from patches import checked
from short_runs import ODD
from torch import nn

import common
import machinery.usertask


def build(*argv):
    return machinery.usertask.Task(make_args("single", *argv)).build_net()


def state_dict(*argv, seed="1"):
    return build("--seed", seed, *argv).state_dict()


def test_seed_decides_the_initial_weights():
    first, other, again = (state_dict(seed=seed) for seed in "010")
    assert deviation(again, first) == 0 and deviation(other, first) > 0.1


def test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named(
    tmp_path, capsys
):
    weights = state_dict()
    given = {
        f"module._orig_mod.{name}": value for name, value in weights.items() if name != "conv1.bias"
    }
    given |= {
        "module._orig_mod.head.weight": torch.zeros(1000, 384),
        "extra.weight": torch.zeros(2),
    }
    for name, content in (
        ("plain", given),
        ("checkpoint", {"model": given, "epoch": 3}),
        ("lightning", {"state_dict": given}),
        ("detector", {"weights": given, "epoch": 3}),
    ):
        torch.save(content, tmp_path / name)
        net = build("--weights", str(tmp_path / name))
        for parameter, value in net.state_dict().items():
            assert value.equal(weights[parameter]) == (
                parameter not in ("conv1.bias", "head.weight")
            ), parameter
        assert capsys.readouterr().out.splitlines() == [
            f"weights: 6 of the model's 8 tensors are from --weights {tmp_path / name}",
            "weights: not loaded: conv1.bias [48], not in the file",
            "weights: not loaded: head.weight [10, 384], [1000, 384] in the file",
            "weights: not in the model: extra.weight",
        ]


TIED = """
from torch import nn
from small import build_datasets, per_sample_loss, per_sample_metrics

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.again.weight = self.first.weight

    def forward(self, images):
        pixels = images.flatten(1).to(self.head.weight.dtype) / 90 - 0.8
        return self.head(self.again(self.first(pixels).relu()).relu())

def build_model(args):
    return Net()
"""


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("fsdp", 2)])
def test_weights_of_a_checkpoint_are_those_that_were_evaluated(mode, n, tmp_path, monkeypatch):
    """The average, also of a tensor that has two names."""
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "tied.py").write_text(TIED)
    options = "--epochs 2 --batch-size 30 --dtype float64 --device cpu --average ema"
    argv = ("--task", tmp_path / "tied.py", *options.split())
    trained = train(mode, n, *argv, folder=tmp_path / "trained")
    assert trained.code == 0, trained.err
    checkpoint = trained.checkpoint()
    weights, model = checkpoint["weights"], checkpoint["model"]
    average = checkpoint["average"]["tensors"]
    assert weights.keys() == model.keys() >= {"first.weight", "again.weight"}
    for found, wanted in ((weights, average), (model, model)):
        assert found["again.weight"].equal(wanted["first.weight"])
        assert found["first.weight"].equal(wanted["first.weight"])
    assert deviation(weights, model) > 1e-4
    argv = (*argv, "--eval-only", "--weights", trained.folder / "last.pt")
    (line,) = train("single", 1, *argv, folder=tmp_path / "evaluated").eval_lines()
    assert line["loss"] == pytest.approx(trained.eval_lines()[-1]["loss"], rel=1e-12)


def test_tensor_with_two_names_is_trained_and_saved_in_shards(tmp_path, monkeypatch):
    """Without an average, and after the check: its forwards leave such a tensor whole."""
    monkeypatch.syspath_prepend(str(TASKS))
    (tmp_path / "tied.py").write_text(TIED)
    argv = ("--task", tmp_path / "tied.py", *"--epochs 2 --dtype float64 --device cpu".split())
    result = train("fsdp", 2, *argv, folder=tmp_path, patch=checked)
    assert result.code == 0, result.err
    model = result.checkpoint()["model"]
    assert model["again.weight"].equal(model["first.weight"])
    assert deviation(model, single_run(*argv).checkpoint()["model"]) < 1e-10


def test_weights_that_do_not_fit_at_all_or_are_damaged_are_refused(tmp_path):
    for name, content, message in (
        (
            "foreign",
            {"layer.weight": torch.zeros(3)},
            "no tensor fits the model, whose tensors are conv1.weight,",
        ),
        ("list", [torch.zeros(3)], "no tensor fits the model"),
        ("code", {"conv1.weight": os.getcwd}, "damaged, or no file of tensors"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(
            common.UsageError, match=f"--weights {tmp_path / name}: {message}"
        ) as refusal:
            check("single", 1, "--weights", str(tmp_path / name))
        assert "weights_only" not in str(refusal.value), "torch's advice to let it run its code"
    torch.save(
        {name: value * float("nan") for name, value in state_dict().items()}, tmp_path / "nan"
    )
    with pytest.raises(common.UsageError, match=r"conv1.weight, conv1.bias, .* is not finite"):
        check("single", 1, "--weights", str(tmp_path / "nan"))


@pytest.mark.parametrize(("mode", "n"), [("single", 1), ("ddp", 2)])
def test_weights_are_where_training_starts_in_every_mode(mode, n, tmp_path):
    small = ("--task", str(TASKS / "small.py"))
    weights = state_dict(*small)
    torch.save(weights, tmp_path / "weights.pt")
    argv = ("--epochs", "1", *small, *"--batch-size 100 --dtype float64 --lr 0".split())
    result = train(mode, n, *argv, "--weights", tmp_path / "weights.pt", folder=tmp_path)
    assert result.code == 0 and result.out.count("weights: 8 of the model's 8 tensors") == 1, (
        result.out + result.err
    )
    assert all(
        value.equal(weights[name].double()) for name, value in result.checkpoint()["model"].items()
    )
    resumed = train(mode, n, *argv[2:], "--epochs", "2", "--resume", "auto", folder=tmp_path)
    assert resumed.code == 0, "whoever goes on needs the weights no more"


def test_infinite_buffers_are_loaded(tmp_path):
    argv = (*ODD, "--model", "masks", "--epochs", "1")
    trained = train("single", 1, *argv, folder=tmp_path / "first")
    weights = ("--weights", trained.folder / "best.pt")
    again = train("single", 1, *argv, *weights, folder=tmp_path / "second")
    assert again.code == 0, again.err
    assert "weights: 14 of the model's 14 tensors" in again.out


def trainable(net):
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["*", "!1.*"], {"1.weight", "1.bias"}),
        (["0.*", "!0.*", "*", "!*.bias"], {"0.bias", "1.bias"}),  # the last that matches decides
        (["0.*", "!0.bias", "1.bias"], {"0.bias", "1.weight"}),
    ],
)
def test_freeze_all_but(patterns, trained):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    common.freeze(net, patterns)
    assert trainable(net) == trained


@pytest.mark.parametrize("pattern", ["!nothing*", "nothing*", "!*.weight"])
def test_pattern_without_effect_is_refused(pattern):
    """ "!head.*" alone freezes nothing: it is "*" "!head.*" that trains the head alone."""
    with pytest.raises(common.UsageError, match=re.escape(f"--freeze {pattern}: ")):
        common.freeze(nn.Sequential(nn.Linear(2, 2)), ["*.bias", pattern])


def test_part_that_is_called_module_keeps_its_weights():
    """Without prefixes both layers would have one name."""
    net = nn.ModuleDict(
        {"layer": nn.Linear(1, 1), "module": nn.ModuleDict({"layer": nn.Linear(1, 1)})}
    )
    wanted = {
        name: torch.full_like(value, i) for i, (name, value) in enumerate(net.state_dict().items())
    }
    common.load_weights(net, wanted, "the file", complete=True)
    assert all(value.equal(wanted[name]) for name, value in net.state_dict().items())


def test_weights_from_elsewhere_are_evaluated_without_a_checkpoint(tmp_path):
    trained = train("single", 1, *ODD, folder=tmp_path / "trained")
    weights = {f"module.{name}": v for name, v in trained.checkpoint()["model"].items()}
    torch.save({"weights": weights}, tmp_path / "old.pth")
    argv = (*ODD, "--eval-only", "--weights", tmp_path / "old.pth")
    result = train("ddp", 2, *argv, folder=tmp_path / "evaluated")
    assert result.code == 0, result.err
    (line,) = result.eval_lines()
    expected = trained.eval_lines()[-1]
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert line["count"] == expected["count"] and not (result.folder / "last.pt").exists()

    name, _ = weights.popitem()
    torch.save({"weights": weights}, tmp_path / "old.pth")
    random = train("single", 1, *argv, folder=tmp_path / "random")
    assert random.code == 2
    assert f"not loaded: {name.removeprefix('module.')} [" in random.err
