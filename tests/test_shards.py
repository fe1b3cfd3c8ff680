"""Checkpoints in shards (`--shards`): the same run in any mode, whole at any instant, and no folder is left over."""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import differences
from harness import ROOT, TASKS, deviation, in_group, prove, single_run, train, undisturbed
from patches import BASE, Patches, stop_after, without_speed
from runs import assert_same_log
from short_runs import EVERYTHING
from whole import load_whole

import machinery.run
from machinery.shards import is_place, remove_unnamed, split

ALL = (*EVERYTHING, "--average", "ema", "--keep-every", "2")  # dropout and BatchNorm too
ADAM = (*BASE, "--optimizer", "adamw", "--lr", "0.003", "--average", "ema")


def folders(directory):
    return {path.name for path in directory.glob("shards-*")}


def named(directory):
    """The folders that the checkpoints of a directory name."""
    files = [torch.load(path, weights_only=True) for path in directory.glob("*.pt")]
    return {file["shards"]["folder"] for file in files if "shards" in file}


def assert_bitwise(result, reference):
    """The run in shards left what the other one left in whole files; and nothing else."""
    assert result.code == 0, result.err
    for path in reference.folder.glob("*.pt"):
        ours, theirs = load_whole(result.folder / path.name), reference.checkpoint(path.name)
        assert ours.keys() == theirs.keys()
        for part in theirs.keys() - {"config"}:
            assert not differences(ours[part], theirs[part], part)
    assert folders(result.folder) == named(result.folder)
    assert not list(result.folder.rglob(".*"))


def test_run_in_shards_is_bitwise_the_run_in_whole_files_and_resumes_so(tmp_path):
    straight = undisturbed("fsdp", 3, *ALL)
    stop = functools.partial(stop_after, 9)
    stopped = train("fsdp", 3, *ALL, "--shards", folder=tmp_path, patch=stop)
    assert stopped.code == 143, stopped.err
    saved = stopped.checkpoint()
    reached, cut = saved["global_step"], [v for v in saved["model"].values() if is_place(v)]
    assert len(cut) >= 4 and saved["shards"]["files"] == 3, "the parameters are not in last.pt"
    largest = max(
        path.stat().st_size for path in (stopped.folder / saved["shards"]["folder"]).iterdir()
    )
    assert largest < 0.5 * (straight.folder / "last.pt").stat().st_size
    resumed = train("fsdp", 3, "--resume", "auto", folder=tmp_path)
    assert_bitwise(resumed, straight)
    assert "before)" not in resumed.out and len(folders(resumed.folder)) > 1
    assert_same_log(resumed, straight, reached)


FSDP4 = ("fsdp", 4, "--shards", "--shard-size", "2")
CHAINS = [[("fsdp", 3, "--shards"), ("single", 1)]]
CHAINS += [[("fsdp", 3, "--shards"), ("ddp", 2), ("fsdp", 2, "--shards"), FSDP4, ("dp", 2)]]
CHAINS += [[FSDP4, ("fsdp", 3, "--shards"), ("fsdp", 2, "--no-shards"), ("spawn", 2)]]


@pytest.mark.parametrize(
    "chain", [CHAINS[0], *(pytest.param(c, marks=pytest.mark.full) for c in CHAINS[1:])]
)
def test_any_mode_and_world_size_goes_on_from_shards(chain, tmp_path):
    straight = single_run(*ADAM)
    for (mode, n, *options), step in zip(chain, [5, 3, 3, 3, None]):
        ends = (mode, n, *options) == tuple(chain[-1])
        stop = None if ends else functools.partial(stop_after, step)
        result = train(mode, n, *ADAM, *options, "--resume", "auto", folder=tmp_path, patch=stop)
        assert result.code == (0 if ends else 143), result.err
        assert folders(result.folder) == named(result.folder)
    ours, theirs = result.checkpoint(), straight.checkpoint()
    assert "shards" not in ours, "the last mode writes whole files"
    for part in ("model", "weights"):
        found = deviation(ours[part], theirs[part])
        prove("resumed run, other mode or world size", "uninterrupted run", found, 1e-10)
    assert [line["global_step"] for line in result.train_lines()] == list(range(1, 19))


@pytest.fixture(scope="module")
def in_shards(tmp_path_factory):
    """A run in shards that has ended; do not change its files."""
    result = train(
        "fsdp", 2, *ADAM, "--shards", "--keep-every", "2", folder=tmp_path_factory.mktemp("run")
    )
    assert result.code == 0, result.err
    return result


def hold_other_tensors():
    """An optimizer may keep tensors that FSDP has not cut by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(12.0).view(3, 4)
    places = {"same": Replicate(), "columns": Shard(1), "rows": Shard(0)}
    state = {name: distribute_tensor(whole, mesh, [place]) for name, place in places.items()}
    rows = []
    found = split(state | {"number": 7}, rows)
    assert is_place(found["rows"]) and [len(own) for own in rows] == [2 - dist.get_rank()]
    assert rows[0].untyped_storage().nbytes() == rows[0].nbytes, "without padding"
    for name in ("same", "columns"):
        assert found[name] is None if dist.get_rank() else found[name].equal(whole)


def test_only_what_is_cut_by_rows_goes_into_shards():
    in_group(2, hold_other_tensors)


def test_names_of_one_save_share_a_folder(in_shards):
    files = {
        path.name: torch.load(path, weights_only=True) for path in in_shards.folder.glob("*.pt")
    }
    assert files.keys() == {"last.pt", "best.pt", "epoch-0002.pt"}
    epochs = {file["shards"]["folder"]: file["epoch"] for file in files.values()}
    assert len(epochs) == len({file["epoch"] for file in files.values()}) > 1
    assert folders(in_shards.folder) == {*epochs}


def test_whole_makes_the_ordinary_file_of_it(in_shards, tmp_path):
    command = [sys.executable, ROOT / "tools" / "whole.py", in_shards.folder / "last.pt"]
    done = subprocess.run(
        [*command, tmp_path / "out.pt"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    theirs = undisturbed("fsdp", 2, *ADAM, "--keep-every", "2")
    wanted = theirs.checkpoint()
    assert ours.keys() == wanted.keys()
    for part in wanted.keys() - {"config"}:
        assert not differences(ours[part], wanted[part], part)
    size = (tmp_path / "out.pt").stat().st_size
    assert size < 1.1 * (theirs.folder / "last.pt").stat().st_size, "a tensor is there once"
    missing = subprocess.run(
        [*command[:2], tmp_path / "none.pt", "x"], capture_output=True, text=True
    )
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1, missing.stderr


@pytest.mark.parametrize(
    ("mode", "n"), [("single", 1), pytest.param("fsdp", 3, marks=pytest.mark.full)]
)
def test_evaluation_of_best_reads_shards(mode, n, in_shards, tmp_path):
    options = ("--eval-only", "--resume", str(in_shards.folder / "best.pt"))
    result = train(mode, n, *ADAM, *options, folder=tmp_path)
    assert result.code == 0, result.err
    best = in_shards.checkpoint("best.pt")["epoch"]
    (line,), lines = result.eval_lines(), in_shards.eval_lines()
    assert line["loss"] == pytest.approx(lines[best - 1]["loss"], rel=1e-10)


def test_link_is_read_and_a_file_of_others_keeps_no_folder(in_shards, tmp_path):
    folder = Path(shutil.copytree(in_shards.folder, tmp_path / "run"))
    (tmp_path / "link.pt").symlink_to(folder / "best.pt")
    options = ("--eval-only", "--resume", tmp_path / "link.pt")
    result = train("single", 1, *ADAM, *options, folder=tmp_path / "evaluated")
    assert result.code == 0, result.err
    (folder / "others.pt").write_text("not of this program")
    shutil.copytree(next(folder.glob("shards-*")), folder / "shards-00000001-00000000")
    remove_unnamed(folder)
    (folder / "others.pt").unlink()
    assert folders(folder) == named(folder) != set()


def test_what_wants_one_file_names_the_tool(in_shards, tmp_path):
    refused = train("single", 1, *ADAM, "--weights", in_shards.folder / "best.pt", folder=tmp_path)
    assert refused.code == 2 and refused.err.count("\n") == 1, refused.err
    assert "best.pt: in shards; python tools/whole.py FILE OUT.pt makes one file" in refused.err
    command = [
        sys.executable,
        ROOT / "tasks" / "gpt.py",
        "generate",
        in_shards.folder / "best.pt",
        "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "python tools/whole.py" in done.stderr.splitlines()[-1]


def test_run_in_another_directory_takes_the_shards_along(in_shards, tmp_path):
    """The first directory may go."""
    shutil.copytree(in_shards.folder, tmp_path / "first")
    resume = ("--resume", tmp_path / "first" / "epoch-0002.pt")
    stop = functools.partial(stop_after, 1)
    stopped = train("ddp", 2, *ADAM, *resume, folder=tmp_path, patch=Patches(no_save, stop))
    assert stopped.code == 1 and "no disk" in stopped.err, stopped.err
    shutil.rmtree(tmp_path / "first")
    last = train("fsdp", 2, *ADAM, "--shards", "--resume", "auto", folder=tmp_path)
    assert last.code == 0 and "resumed at epoch 3, step 0" in last.out, last.err
    ours, theirs = (load_whole(run.folder / "last.pt")["model"] for run in (last, in_shards))
    assert deviation(ours, theirs) == 0
    assert folders(last.folder) == named(last.folder)


def no_save(rank):
    def save(*arguments):
        raise OSError("no disk")

    machinery.run.save_checkpoint = save


# ----------------------------------------------------------------------------------- what is refused


def damage(run, what):
    folder = run / torch.load(run / "last.pt", weights_only=True)["shards"]["folder"]
    file = folder / "00001.pt"
    if what == "a bit":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif what == "a file":
        file.unlink()
    elif what == "the folder":
        shutil.rmtree(folder)
    else:
        saved = torch.load(run / "last.pt", weights_only=True)
        saved["shards"]["folder"] = "../run"
        torch.save(saved, run / "last.pt")


@pytest.mark.parametrize(
    "what",
    [
        "a bit",
        *(pytest.param(w, marks=pytest.mark.full) for w in ("a file", "the folder", "a path")),
    ],
)
@pytest.mark.parametrize(("mode", "n"), [("ddp", 2)])
def test_damaged_shards_are_named_and_nothing_is_lost(what, mode, n, in_shards, tmp_path):
    shutil.copytree(in_shards.folder, tmp_path / "run")
    damage(tmp_path / "run", what)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused = train(mode, n, "--resume", "auto", folder=tmp_path)
    assert refused.code == 2, refused.err
    text = "is no folder of shards" if what == "a path" else ".pt: damaged, or no file of tensors"
    assert text in refused.err and refused.err.count("\n") == 1, refused.err
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert before == after


def elsewhere(folder, rank):
    """Rank 1 is on a machine that has another directory of that name."""
    if rank == 1:
        import train_fsdp

        parse = train_fsdp.parse_args

        def parsed(*arguments):
            args = parse(*arguments)
            args.output_dir = str(folder)
            return args

        train_fsdp.parse_args = parsed


def test_directory_that_a_rank_does_not_see_is_refused_before_the_run(tmp_path):
    (tmp_path / "other").mkdir()
    patch = functools.partial(elsewhere, tmp_path / "other")
    whole = train("fsdp", 2, *ADAM, "--epochs", "1", folder=tmp_path / "whole", patch=patch)
    assert whole.code == 0, "rank 0 alone writes"
    refused = train("fsdp", 2, *ADAM, "--shards", folder=tmp_path, patch=patch)
    assert refused.code == 2 and "step" not in refused.out, refused.err
    wanted = "error: --shards needs a directory that all ranks see: [Errno 2]"
    assert wanted in refused.err and "(rank 1)" in refused.err
    assert not folders(refused.folder) and not any((tmp_path / "other").iterdir())


# ----------------------------------------------------------------------- saves that come to nothing


def poison(rank):
    """Make a weight NaN that rank 1 holds, after the fourth step."""
    save = machinery.run.Run.save

    def poisoned(run, *names):
        if run.state.epoch == 1 and rank == 1:
            with torch.no_grad():
                run.state.net.first.weight.to_local()[-1] = float("nan")
        save(run, *names)

    machinery.run.Run.save = poisoned


def test_what_became_non_finite_on_one_rank_is_never_saved(tmp_path):
    result = train("fsdp", 2, *BASE, "--shards", folder=tmp_path, patch=poison)
    assert result.code == 3, result.err
    assert (
        "is not saved, the last good checkpoint stays: non-finite values in first.weight"
        in result.err
    )
    assert result.checkpoint()["epoch"] == 0 and folders(result.folder) == named(result.folder)
    load_whole(result.folder / "last.pt")


def kill_at_call(number, who, rank):
    """SIGKILL for rank `who` just before the number-th of the system calls of which saves are made."""
    calls = itertools.count(1)
    for name in ("mkdir", "fsync", "replace", "rmdir") if rank == who else ():
        original = getattr(os, name)

        def call(*arguments, original=original, **options):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, call)


SMALL = ("--task", TASKS / "faulty.py", "--epochs", "2", "--batch-size", "30", "--save-every", "4")
SMALL += ("--average", "ema", "--dtype", "float64", "--log-every", "1")
# Of rank 0, 1 makes the directory, 2 to 6 look at it. A save has eight: in the seventh last.pt appears.
QUICK = [(8, 0, 0), (20, 0, 4), (22, 0, 6), (8, 1, 4)]  # call, rank, the step that is on the disk
SLOW = [(n, 0, 0 if n < 14 else 4 if n < 22 else 6) for n in (4, 13, 14, 23)] + [(4, 1, 0)]
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW]


@pytest.mark.parametrize(("number", "rank", "step"), [*QUICK, *SLOW])
def test_killed_within_a_save_in_shards(number, rank, step, tmp_path):
    patch = functools.partial(kill_at_call, number, rank)
    killed = train("fsdp", 2, *SMALL, "--shards", folder=tmp_path, patch=patch)
    assert killed.code not in (0, 2), "a rank was killed"
    last = killed.folder / "last.pt"
    assert (load_whole(last)["global_step"] if last.exists() else 0) == step
    resumed = train("fsdp", 2, *SMALL, "--shards", "--resume", "auto", folder=tmp_path)
    assert_bitwise(resumed, undisturbed("fsdp", 2, *SMALL))
    assert without_speed(resumed.lines) == without_speed(undisturbed("fsdp", 2, *SMALL).lines)
