"""Break the project on purpose, one small fault at a time, and see that a test fails each time: `bash run.sh mutants [options]`.

Each fault is put into a copy of the project in a temporary folder, and the tests that should notice it are run there. First all of these
tests must pass in a copy without a fault. A fault that no test notices is a survivor: a test is missing. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SIDE_BY_SIDE = 2
SLOW = ["torch._dynamo", "torchvision.datasets", "torchvision.models", "torchvision.transforms.v2", "pytest", "unittest.mock"]
SLOW += ["torch.distributed.run", "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"]  # and nothing of the project
context = multiprocessing.get_context("forkserver")
one_thread = threading.Lock()  # an exit code can be read only once
TIMEOUT = 150  # seconds for the tests of one mutant; a hang is not what a test should rest on, so that it counts as a survivor


@functools.lru_cache(50)
def squeeze(text: str, file: str) -> tuple[str, list[int]]:
    """Return the text without what a formatter or a writer may change, and the place of each character that is left.

    In Python that is white space, comments, and a comma before a closing bracket: a mutant lives on when code is only written otherwise.
    """
    if file.endswith(".sh"):
        return text, list(range(len(text)))
    hidden = {place for comment in re.finditer(r"  #.*", text) for place in range(*comment.span())}
    places = [i for i, character in enumerate(text) if i not in hidden and not character.isspace()]
    places = [i for i, after in zip(places, [*places[1:], None]) if not (text[i] == "," and after is not None and text[after] in ")]}")]
    return "".join(text[i] for i in places), places


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests`, those that fail soonest first, are "checkpoint::test_name"."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Return the broken text of the file."""
        text = (root / self.file).read_text()
        squeezed, places = squeeze(text, self.file)
        wanted, _ = squeeze(self.old, self.file)
        if squeezed.count(wanted) != 1:
            raise ValueError(f"{self.name}: what it replaces occurs {squeezed.count(wanted)} times in {self.file}, not once: {self.old!r}")
        first = squeezed.index(wanted)
        start, end = places[first], places[first + len(wanted) - 1] + 1
        if self.file.endswith(".sh"):
            return text[:start] + self.new + text[end:]
        line = text[text.rfind("\n", 0, start) + 1 :]
        moved = len(line) - len(line.lstrip(" ")) - (len(self.old) - len(self.old.lstrip(" ")))
        lines = self.new.strip().splitlines()
        rest = [" " * (moved if self.old.startswith(" ") else 0) + line for line in lines[1:]]
        return text[:start] + "\n".join([*lines[:1], *rest]) + text[end:]

    def selection(self) -> list[str]:
        return [f"tests/test_{file}.py{separator}{name}" for file, separator, name in (test.partition("::") for test in self.tests)]


MUTANTS: list[Mutant] = []


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> None:
    MUTANTS.append(Mutant(name, file if file.endswith(".sh") else f"{file}.py", old, new, tests))


BITWISE = "checkpoint::test_interrupted_and_resumed_run_is_bitwise_the_uninterrupted_one"
EQUAL = "equivalence::test_mode_equals_one_device"
FEATURE = "equivalence::test_feature_equals_one_device"
REFUSED = "cli::test_bad_input_is_refused_by_name"
LR = "training_math::test_learning_rate_in_the_log_is_the_function_of_the_step"
SCALE_LR = "training_math::test_scale_lr_multiplies_by_the_world_size_only_when_asked"
SKIP = "training_math::test_scaler_skips_and_counts_non_finite_gradients_at_every_precision"
AUGMENTED = "sampling::test_a_sample_is_augmented_alike_whoever_loads_it"
DAMAGED = "checkpoint::test_damaged_file_is_named_and_auto_falls_back_to_the_previous_one"
DURABLE = "checkpoint::test_save_is_durable_before_it_is_visible"
PIECES = "sampling::test_pieces_of_all_ranks_partition_each_global_batch[2]"
SHARDS = "sampling::test_evaluation_shards_partition_the_data_unpadded[3]"
ORDER = "sampling::test_order_is_a_function_of_seed_and_epoch"
SYNC_BN = "sync_batchnorm::test_equals_batchnorm_on_the_whole_batch"
UNIFORM = "sampling::test_keyed_uniform_is_uniform_and_depends_on_everything"
NAN = "survivors::test_nan_is_skipped_in_every_mode"
MASKS = "survivors::test_dropout_never_repeats"
DIVERGED = "survivors::test_ten_skipped_steps_in_a_row_end_the_run"
ONE, MANY = "pitfalls_01_14::test_pitfall_", "pitfalls_15_28::test_pitfall_"
LAST = "pitfalls_29_42::test_pitfall_"
ENDINGS = "endings::test_"

# One fault takes two or three lines here, and not seven.
# fmt: off

# ------------------------------------------------------------------------------------------------------ the loops of the scripts

WRAP = "model = DistributedDataParallel(net, find_unused_parameters=args.find_unused_parameters, gradient_as_bucket_view=True)"
SCALED = "loss = losses.sum() * (dist.get_world_size() / args.batch_size)"
UNSCALE = "        grad_norm = state.scaler.unscale_(state.optimizer)  # clipping and the check for NaN need the true gradient\n"
CLIP = "        common.clip_grad_norm(state.net, args.clip_grad_norm, grad_norm)\n"
NORM = "        grad_norm = nn.utils.get_total_norm([p.grad for p in state.net.parameters() if p.grad is not None])\n"
STEP = "state.scaler.step(state.optimizer)  # does nothing if a gradient is not finite"
ADD = "            run.meter.add(loss=losses)\n"
SYNC = "        common.sync_buffers(state.averaged())  # BatchNorm statistics of rank 0 for all; raises if the weights differ\n"
SAMPLER = "common.GlobalBatchSampler(args, train_set, rank, world_size)"
REPEAT = "    common.repeat_first_backward(args, task, model, train_set, state)  # so that a resumed run is bitwise the same\n"
EVALUATE = "run.end_epoch(evaluate(args, task, state.averaged(), val_loader, device))"
CONVERT = "net = convert_sync_batchnorm(net, device) if args.sync_bn else net"

for mode, two, uneven in (("ddp", f"{EQUAL}[ddp-2-1]", f"{EQUAL}[ddp-2-2]"), ("spawn", f"{EQUAL}[spawn-2-1]", f"{EQUAL}[spawn-2-2]")):
    script, masks, nan = f"train_{mode}", f"{MASKS}[{mode}-2]", f"{NAN}[{mode}-2]"
    resumed = f"{BITWISE}[spawn-3-9]" if mode == "spawn" else "survivors::test_resume_on_three_ranks_is_bitwise"
    sync_bn = f"survivors::test_sync_bn_with_accumulation_equals_one_device[{mode}-2]"
    mutant(f"{mode}: no wrapper", script, WRAP, "model = net\n    model.no_sync = torch.enable_grad", two)
    mutant(f"{mode}: world size missing in the loss", script, SCALED, "loss = losses.sum() / args.batch_size", two)
    mutant(f"{mode}: mean of the ranks' means", script, SCALED, "loss = losses.mean() / args.accum_steps", uneven)
    mutant(f"{mode}: every rank trains on the whole batch", script, SAMPLER, "common.GlobalBatchSampler(args, train_set)", two)
    mutant(f"{mode}: dropout seed without the rank", script, "state.global_step, i, dist.get_rank())", "state.global_step, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, "state.global_step, i, dist", "state.global_step, 0, dist", masks)
    mutant(f"{mode}: dropout seed repeats every epoch", script, "args.seed, state.global_step, i", "args.seed, state.step, i", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", nan)
    mutant(f"{mode}: buffers not synchronised", script, SYNC, "", f"survivors::test_batchnorm_buffers_are_evaluated_alike[{mode}]")
    mutant(f"{mode}: --sync-bn ignored", script, CONVERT, "net = net", sync_bn)
    mutant(f"{mode}: first backward not repeated", script, REPEAT, "", resumed)
    mutant(f"{mode}: gradients kept after the step", script, "        state.optimizer.zero_grad(set_to_none=True)\n", "", two)

mutant("ddp: nothing is synchronised", "train_ddp",
       "        yield from micro_batches[:-1]\n    yield micro_batches[-1]\n", "        yield from micro_batches\n",
       f"{EQUAL}[ddp-2-1]")
mutant("ddp: the first micro-batch is synchronised", "train_ddp",
       "    with model.no_sync():  # forward and backward of the others run in here\n"
       "        yield from micro_batches[:-1]\n    yield micro_batches[-1]\n",
       "    yield micro_batches[0]\n    with model.no_sync():\n        yield from micro_batches[1:]\n", f"{EQUAL}[ddp-2-2]")
mutant("ddp: every micro-batch is synchronised", "train_ddp", "with model.no_sync():", "with torch.enable_grad():",
       ONE + "09_accumulation_synchronises_the_last_piece")
mutant("ddp: forward outside no_sync", "train_ddp", "losses = task.per_sample_loss(model(inputs), targets)",
       "model.require_backward_grad_sync = True\n                losses = task.per_sample_loss(model(inputs), targets)",
       ONE + "09_accumulation_synchronises_the_last_piece")
mutant("ddp: clipped before unscaling", "train_ddp", UNSCALE + CLIP, NORM + CLIP + UNSCALE, MANY + "21_clipping_sees_the_true_gradient")
mutant("ddp: unscale_ missing", "train_ddp", UNSCALE, NORM, MANY + "21_clipping_sees_the_true_gradient")
mutant("ddp: schedule stepped per micro-batch", "train_ddp", ADD, ADD + "            state.scheduler.step()\n",
       MANY + "24_schedule_counts_global_batches")
mutant("ddp: a rank leaves its own NaN out", "train_ddp", f"            {SCALED}",
       f"            if not losses.isfinite().all():\n                continue\n            {SCALED}", ONE + "05_nan_on_one_rank")
mutant("ddp: evaluates the weights, not their average", "train_ddp", EVALUATE, EVALUATE.replace("state.averaged()", "net"),
       f"{FEATURE}[ddp-3-ema]")
mutant("ddp: every rank evaluates everything", "train_ddp",
       "ShardSampler(len(val_set), args.eval_batch_size, rank, world_size)",
       "ShardSampler(len(val_set), args.eval_batch_size)", MANY + "19_all_ranks_evaluate")
mutant("ddp: @record missing", "train_ddp", "@record  # torchrun then shows the traceback of the rank that failed first\n", "",
       LAST + "41_torchrun_shows_the_cause")
mutant("ddp: --timeout not handed on", "train_ddp", "common.timeout(args), world_size", "None, world_size",
       "survivors::test_timeout_reaches_the_process_group[ddp-2]")
mutant("ddp: --find-unused-parameters ignored", "train_ddp", "find_unused_parameters=args.find_unused_parameters, ", "",
       MANY + "28_unused_parameters")
mutant("ddp: --grad-compress ignored", "train_ddp", "    common.compress_gradients(args, model, state.scaler)  # on slow links\n", "",
       "survivors::test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("spawn: --timeout not handed on", "train_spawn", "common.timeout(args), world_size", "None, world_size",
       "survivors::test_timeout_reaches_the_process_group[spawn-2]")
mutant("spawn: local rank for rank", "train_spawn", "args.node_rank * args.nproc + local_rank, args", "local_rank, args",
       LAST + "40_two_launchers_are_one_job")
mutant("spawn: arguments checked after the start", "train_spawn", "    common.check_run(args)\n", "",
       "survivors::test_spawn_checks_before_it_starts_a_process")

PLAIN = "loss = losses.sum() / args.batch_size"
SEED = "common.seed_rng(args.seed, state.global_step, i)"
for mode, n in (("single", 1), ("dp", 2)):
    script, masks = f"train_{mode}", f"{MASKS}[{mode}-{n}]"
    accumulated = "equivalence::test_accumulation_on_one_device[2]" if mode == "single" else f"{EQUAL}[dp-2-2]"
    mutant(f"{mode}: mean over the micro-batch", script, PLAIN, "loss = losses.mean()", accumulated)
    mutant(f"{mode}: dropout seed without the step", script, SEED, "common.seed_rng(args.seed, 0, i)", masks)
    mutant(f"{mode}: dropout seed without the micro-batch", script, SEED, "common.seed_rng(args.seed, state.global_step, 0)", masks)
    mutant(f"{mode}: NaN is not skipped", script, STEP, "state.optimizer.step()", f"{NAN}[{mode}-{n}]")
    mutant(f"{mode}: clipped before unscaling", script, UNSCALE + CLIP, NORM + CLIP + UNSCALE,
           "survivors::test_loss_scale_leaves_no_trace[" + f"{mode}-{n}]")
    mutant(f"{mode}: unscale_ missing", script, UNSCALE, NORM, f"survivors::test_loss_scale_leaves_no_trace[{mode}-{n}]")
    mutant(f"{mode}: model stays in evaluation mode", script, "    common.train_mode(model)\n", "", masks)
    mutant(f"{mode}: model evaluated in training mode", script, "    model.eval()\n", "", masks)

mutant("single: schedule stepped per micro-batch", "train_single", ADD, ADD + "            state.scheduler.step()\n", f"{LR}[constant]")
mutant("single: loss of the last micro-batch alone is logged", "train_single", ADD,
       "            run.meter.clear()\n" + ADD,
       "equivalence::test_accumulation_on_one_device[2]")
mutant("dp: mean of the replicas' means", "train_dp", PLAIN,
       "loss = sum(piece.mean() for piece in losses.chunk(args.replicas)) / args.replicas", LAST + "29_data_parallel_gathers_losses")
mutant("dp: loss computed outside the replicas", "train_dp", "losses = model(inputs, targets)  #",
       "losses = task.per_sample_loss(state.net(inputs), targets)  #", LAST + "29_data_parallel_gathers_losses")
mutant("dp: replicas not counted in --scale-lr", "train_dp", "common.build_optimizer(args, net, args.replicas)",
       "common.build_optimizer(args, net)", f"{SCALE_LR}[dp-linear-4]")
mutant("dp: evaluates the weights, not their average", "train_dp", EVALUATE, EVALUATE.replace("state.averaged()", "net"),
       f"{FEATURE}[dp-3-ema]")

# --------------------------------------------------------------------------------------------------------- common.py: samplers

mutant("order: the same every epoch", "loading", "manual_seed(mix(self.seed, self.epoch))", "manual_seed(mix(self.seed, 0))", ORDER)
mutant("order: without the seed", "loading", "manual_seed(mix(self.seed, self.epoch))", "manual_seed(mix(0, self.epoch))", ORDER)
mutant("sampler: a resumed epoch starts anew", "loading", "self.epoch, self.step = epoch, step", "self.epoch, self.step = epoch, 0",
       "sampling::test_resuming_at_any_step_yields_exactly_the_rest[1]")
mutant("sampler: all ranks take the same piece", "loading", "tensor_split(self.world_size)[self.rank] for",
       "tensor_split(self.world_size)[0] for", PIECES)
mutant("sampler: strided pieces", "loading", "piece.tensor_split(self.world_size)[self.rank] for",
       "piece[self.rank :: self.world_size] for", PIECES)
mutant("sampler: torch.chunk, which may leave a rank without samples", "loading", "piece.tensor_split(self.world_size)[self.rank] for",
       "(*piece.chunk(self.world_size), *[piece[:0]] * self.world_size)[self.rank] for",
       "sampling::test_pieces_of_all_ranks_partition_each_global_batch[4]")
mutant("sampler: micro-batches cut after the ranks", "loading", "for piece in global_batch.tensor_split(self.accum_steps)]",
       "for piece in [global_batch]]", "sampling::test_micro_batches_of_all_ranks_are_those_of_one_device[2-2]")
mutant("sampler: the ragged tail is kept", "loading", "steps_per_epoch = length // batch_size",
       "steps_per_epoch = math.ceil(length / batch_size)", PIECES)
mutant("sampler: an empty epoch is accepted", "loading", "if batch_size > length:", "if False:",
       "sampling::test_empty_epoch_is_an_error_that_names_both_numbers")
mutant("evaluation: shards padded to the same length", "loading", "min(start + self.batch_size, self.length)",
       "start + self.batch_size", SHARDS)
mutant("evaluation: every rank starts at sample 0", "loading", "[rank::world_size]", "[0::world_size]", SHARDS)
mutant("evaluation: the last batch is dropped", "loading", "range(0, length, self.batch_size)[",
       "range(0, length - self.batch_size + 1, self.batch_size)[", SHARDS)
mutant("augmentation: no seed per sample", "loading", "seed_generators(mix(self.seed, epoch, index))", "pass",
       f"{AUGMENTED}[3-1-0-per sample]")
mutant("augmentation: per-sample seed without the epoch", "loading", "mix(self.seed, epoch, index)", "mix(self.seed, 0, index)",
       f"{AUGMENTED}[0-3-0-per sample]")
mutant("augmentation: per-sample seed without the index", "loading", "mix(self.seed, epoch, index)", "mix(self.seed, epoch, 0)",
       ONE + "08_augmentation_differs_between_workers_and_epochs")
mutant("augmentation: set_epoch forgotten", "loading", "            dataset.set_epoch(epoch)\n", "            pass\n", f"{AUGMENTED}[0-3-0-in memory]")
mutant("augmentation: draws without the seed", "loading", "mix(mix(seed, epoch), keys", "mix(mix(0, epoch), keys",
       UNIFORM)
mutant("augmentation: draws without the epoch", "loading", "mix(mix(seed, epoch), keys", "mix(mix(seed, 0), keys",
       UNIFORM)
mutant("augmentation: draws without the index", "loading", "keys, np.arange(draws", "np.zeros_like(keys), np.arange(draws", UNIFORM)
mutant("loader: workers started anew every epoch", "loading", '{"persistent_workers": True, ', "{",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("loader: workers do not ignore signals", "options", "signal.signal(number, signal.SIG_IGN)", "pass", ONE + "11_sigterm_saves[2]")
mutant("loader: workers not ended at exit", "loading", "multiprocessing.util.Finalize(None, _end_workers, (processes,), exitpriority=100)", "pass",
       ONE + "06_error_with_loader_workers_ends_the_process")
mutant("split_batch: strided micro-batches", "loading", "tensor.tensor_split(pieces)[i]", "tensor[i::pieces]",
       "sampling::test_split_batch_cuts_nested_targets_along_the_first_dimension[2]")

# ------------------------------------------------------------------------------------------- common.py: reductions, optimization

REDUCE = "training_math::test_reduce_value_sums_or_averages_over_the_ranks_out_of_place[2]"
METER = "training_math::test_meter_is_the_exact_mean_over_uneven_and_empty_shards"
mutant("reduce_value: a sum for a mean", "common", "value = value / dist.get_world_size() if average else value", "pass", REDUCE)
mutant("reduce_value: in place", "common", "value = value.detach().clone()", "value = value.detach()", REDUCE)
mutant("meter: local means, not reduced", "common", "reduce_value(sums, average=False).tolist()", "sums.tolist()", METER)
mutant("meter: ranks averaged", "common", "reduce_value(sums, average=False)", "reduce_value(sums)", METER)
mutant("meter: a mean of means", "common", "value.detach().sum(dtype=self.dtype)\n        self.count += len(value)",
       "value.detach().mean(dtype=self.dtype)\n        self.count += 1", METER)
mutant("meter: batches counted, not samples", "common", "self.count += len(value)", "self.count += 1", METER)
mutant("meter: sums in float32", "common", 'torch.float32 if device.type == "mps" else torch.float64', "torch.float32", f"{EQUAL}[ddp-2-1]")
mutant("meter: count lost at resume", "common", 'int(mine.pop("count"))', 'mine.pop("count") * 0',
       "training_math::test_meter_goes_on_from_its_sums")
mutant("sync_buffers: no broadcast", "common", "dist.broadcast(buffer, src=0)", "pass",
       MANY + "18_batchnorm_buffers_are_equal_in_evaluation")
mutant("sync_buffers: weights not compared", "common", "zip(net.named_parameters(), largest, smallest) if a != b", "[]",
       MANY + "27_forward_past_the_wrapper_is_noticed")
mutant("first backward: buffers keep a trace", "common", "buffer.copy_(before)", "pass", f"{BITWISE}[ddp-2-9]")
mutant("first backward: gradients stay", "common", "    model.zero_grad(set_to_none=True)\n", "", f"{BITWISE}[ddp-2-9]")
mutant("compression: bf16 sent as fp16", "common", 'f"{args.grad_compress}_compress_hook"', '"fp16_compress_hook"',
       "survivors::test_compressed_gradients_differ_by_their_rounding[bf16]")
mutant("seed_rng: without the step", "loading", "mix(seed, step, micro_batch) %", "mix(seed, micro_batch) %",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the rank", "loading", "% 2**63 + rank", "% 2**63",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("seed_rng: without the seed", "loading", "mix(seed, step, micro_batch) %", "mix(0, step, micro_batch) %",
       "training_math::test_dropout_seed_of_replica_r_is_that_of_rank_r")
mutant("model: initial weights without the seed", "common", "    torch.manual_seed(args.seed)\n    net =", "    net =",
       "survivors::test_seed_decides_the_initial_weights")
mutant("freeze: has no effect", "common", "parameters[name].requires_grad_(False)", "parameters[name].requires_grad_(True)",
       "equivalence::test_training_is_not_trivial")
mutant("amp: never on", "common", 'enabled=args.amp != "off"', "enabled=False", "survivors::test_amp_computes_in_its_type[bf16]")
mutant("amp: bf16 for fp16", "common", 'torch.float16 if args.amp == "fp16" else torch.bfloat16', "torch.bfloat16",
       "survivors::test_amp_computes_in_its_type[fp16]")
mutant("optimizer: --weight-decay of AdamW ignored", "common", "betas=(args.momentum, 0.999), weight_decay=args.weight_decay",
       "betas=(args.momentum, 0.999)", "survivors::test_optimizer_has_what_the_options_say")
mutant("optimizer: --weight-decay of SGD ignored", "common", "args.momentum, weight_decay=args.weight_decay", "args.momentum",
       "survivors::test_optimizer_has_what_the_options_say")
mutant("memory: what is freed goes back to the system", "common", "        mallopt(-1, 2**30)", "        0 and mallopt(-1, 2**30)",
       "data_and_models::test_memory_of_the_gradients_is_kept_from_step_to_step")
mutant("optimizer: --nesterov ignored", "common", "nesterov=args.nesterov, ", "", "survivors::test_optimizer_has_what_the_options_say")
mutant("optimizer: momentum not initialised", "common", "for parameter in parameters if args.momentum else ():", "for parameter in ():",
       "training_math::test_fused_sgd_whose_first_step_is_skipped_starts_from_zero_momentum")
mutant("learning rate: always scaled", "common", "[args.scale_lr]", '["linear"]', f"{SCALE_LR}[ddp-none-1]")
mutant("learning rate: root of N not taken", "common", '"sqrt": math.sqrt(world_size)', '"sqrt": world_size', f"{SCALE_LR}[ddp-sqrt-2]")
mutant("warm-up: off by one", "common", "return (step + 1) / warmup", "return step / warmup",
       "training_math::test_warmup_rises_linearly_to_the_peak")
mutant("cosine: ends after the run", "common", "(step - warmup) / max(1, last - warmup)", "(step - warmup) / last",
       "training_math::test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("cosine: begins with the warm-up", "common", "(step - warmup) / max(", "step / max(",
       "training_math::test_cosine_falls_from_one_to_zero_after_the_warmup")
mutant("step: drops one step late", "common", "bisect.bisect_right(", "bisect.bisect_left(",
       "training_math::test_step_drops_at_the_given_epochs")
mutant("step: epochs in another order", "common", "bisect_right(sorted(args.step_epochs), ", "bisect_right(args.step_epochs, ",
       "survivors::test_step_epochs_in_any_order")
mutant("cyclic: a saw-tooth", "common", "(1 - abs(2 * ((step - warmup) % cycle) / cycle - 1))", "((step - warmup) % cycle) / cycle",
       "training_math::test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("cyclic: one cycle only", "common", "((step - warmup) % cycle)", "(step - warmup)", "training_math::test_cyclic_is_a_triangle_between_gamma_and_one")
mutant("scaler: skipped steps not counted", "common", "bad = (torch.stack(found).sum() > 0)", "bad = (torch.stack(found).sum() < 0)",
       f"{SKIP}[nan-off]")
mutant("scaler: in a row is never reset", "common", "(self.in_a_row + bad) * bad", "self.in_a_row + bad", DIVERGED)
mutant("scaler: scale moves in float32", "common", "super().update(self.fixed_scale)", "super().update()", f"{SKIP}[nan-off]")
mutant("scaler: scale of fp16 fixed", "common", 'None if args.amp == "fp16" else 1.0', "1.0", f"{SKIP}[nan-fp16]")
mutant("scaler: skipped steps forgotten at resume", "common", 'self.skipped.fill_(state["skipped"])', "pass",
       "survivors::test_scaler_goes_on_where_it_was_saved")
mutant("scaler: steps in a row forgotten at resume", "common", 'self.in_a_row.fill_(state["in_a_row"])', "pass",
       "survivors::test_scaler_goes_on_where_it_was_saved")
mutant("clipping: limit ignored", "common", "if limit is not None:", "if False:",
       "training_math::test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("clipping: tensor by tensor", "common", "nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)",
       "[nn.utils.clip_grad_norm_(parameter, limit) for parameter in net.parameters()]",
       "training_math::test_clip_grad_norm_looks_at_the_whole_gradient[0.1]")
mutant("scaler: norm before unscaling", "common", "return self.norm", "return self.norm * self._scale",
       "training_math::test_scaler_returns_the_norm_of_the_true_gradient[1024.0]")
mutant("scaler: only NaN is noticed", "common", "1 - self.norm.isfinite()", "self.norm.isnan()", f"{SKIP}[inf-off]")
mutant("ema: another decay", "common", "WeightAverage(net, 0.99", "WeightAverage(net, 0.9",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("ema: statistics not averaged", "common", "if started and before:", "if False:",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("devices: the first one for all", "common", "torch.accelerator.set_device_index(index)",
       "torch.accelerator.set_device_index(0)", MANY + "17_device_is_chosen_before_anything_else")
mutant("devices: all cores for every process", "common", " // processes", "",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("devices: --deterministic ignored", "common", "torch.use_deterministic_algorithms(args.deterministic)",
       "torch.use_deterministic_algorithms(False)", "survivors::test_deterministic_is_handed_to_torch")

# --------------------------------------------------------------------------------------------------------------- checkpoint.py

RESTORE = 'for name in ("optimizer", "scheduler", "scaler"):\n            getattr'
mutant("save: file not on the disk before the rename", "checkpoint",
       "            os.fsync(file.fileno())  # the data must be on the disk before the name points to it\n", "", DURABLE)
mutant("save: name not on the disk", "checkpoint", "    os.fsync(folder)  # and the name too\n", "", DURABLE)
mutant("save: written over the old file", "checkpoint", "os.replace(temporary, path)\n    except",
       "shutil.copyfile(temporary, path)\n    except", DURABLE)
mutant("save: temporary file in another folder", "checkpoint", 'temporary = path.with_name(f".{path.name}.tmp")',
       'temporary = path.parent.parent / f".{path.name}.tmp"', DURABLE)
mutant("save: half a file stays behind", "checkpoint", "        temporary.unlink(missing_ok=True)\n    folder", "        pass\n    folder",
       "checkpoint::test_full_disk_in_the_middle_of_a_save_leaves_the_old_file_and_no_other")
mutant("save: previous.pt not kept", "checkpoint", 'keep_previous(self.folder / "last.pt")', "contextlib.nullcontext()",
       f"{DAMAGED}[truncated]")
mutant("save: NaN is written", "checkpoint", "self.refused = \", \".join(non_finite(checkpoint, self.state.by_design)[:5])", "self.refused = \"\"",
       "checkpoint::test_non_finite_parameters_never_reach_a_file")
mutant("save: NaN in the average is written", "checkpoint", ', *checkpoint["average"].items()]', "]",
       "survivors::test_non_finite_average_never_reaches_a_file")
mutant("save: --save-every ignored", "checkpoint", "if stop or (args.save_every and state.global_step % args.save_every == 0 and state.step < self.steps_per_epoch):", "if stop:",
       "survivors::test_save_every_saves_within_the_epoch")
mutant("save: best.pt is the last", "checkpoint",
       "earlier, best = state.best, math.isfinite(score) and (state.best is None or score > state.best)",
       "earlier, best = state.best, True",
       "survivors::test_best_is_not_the_last")
mutant("save: best.pt is the worst", "checkpoint", "or score > state.best)\n", "or score < state.best)\n",
       "checkpoint::test_best_and_kept_checkpoints")
mutant("load: runs code in the file", "common", "weights_only=True)", "weights_only=False)",
       "checkpoint::test_hostile_pickle_is_refused_and_does_not_run")
mutant("load: checksums not tested", "common", "damaged := file.testzip()", "damaged := None", f"{DAMAGED}[flipped]")
mutant("load: to the device that saved it", "common", 'map_location="cpu", ', "", MANY + "17_device_is_chosen_before_anything_else")
mutant("load: format not looked at", "checkpoint", 'or checkpoint.get("format") != FORMAT', "",
       "survivors::test_checkpoint_of_another_format_is_refused")
mutant("resume: no fallback to previous.pt", "checkpoint", 'for name in ("last.pt", "previous.pt")', 'for name in ("last.pt",)',
       f"{DAMAGED}[truncated]")
mutant("resume: changed options not noticed", "checkpoint", 'check_config(args, checkpoint["config"], path)', "pass",
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("resume: another seed counts as harmless", "checkpoint", 'HARMLESS |= {"channels_last",', 'HARMLESS |= {"seed", "channels_last",',
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--seed 1]")
mutant("resume: a task may not move", "checkpoint", "then, now = Path(then).name, Path(now).name", "pass",
       "survivors::test_task_may_move_to_another_folder")
mutant("resume: optimizer not restored", "checkpoint", RESTORE, RESTORE.replace('"optimizer", ', ""), f"{BITWISE}[single-1-9]")
mutant("resume: scheduler not restored", "checkpoint", RESTORE, RESTORE.replace('"scheduler", ', ""),
       MANY + "23_learning_rate_goes_on_at_resume")
mutant("resume: scaler not restored", "checkpoint", RESTORE, RESTORE.replace(', "scaler"', ""),
       "survivors::test_loss_scale_of_fp16_goes_on_at_resume")
mutant("resume: average not restored", "checkpoint", "self.average.load_state_dict({", "dict({", f"{BITWISE}[single-1-9]")
mutant("resume: learning rate of the shorter run", "checkpoint", 'group["lr"] = peak * factor(self.global_step)', "pass",
       "checkpoint::test_more_epochs_follow_the_longer_schedule_from_the_first_step")
mutant("resume: each rank for itself", "checkpoint", "checkpoint, error = broadcast_object((checkpoint, error))", "pass",
       LAST + "31_rank_0_reads_and_decides")
mutant("resume: sums of the log forgotten", "checkpoint", 'self.meter.restore(checkpoint["log"])', "pass", f"{BITWISE}[single-1-9]")
mutant("resume: sums of all ranks restored on rank 0", "common", "of[rank] if len(of) == world_size else sum(of)",
       "sum(of) if True else sum(of)", f"{BITWISE}[ddp-2-9]")
mutant("resume: sums of the ranks put together", "common", "of[rank] if len(of) == world_size else sum(of)", "sum(of)",
       "training_math::test_sums_of_ranks_go_back_to_the_ranks")
mutant("average: never evaluated", "checkpoint", 'self.average.module if getattr(self.average, "n_averaged", 0) else self.net', "self.net",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("swa: from the first epoch", "checkpoint", "swa_epochs(args.epochs, state.epoch + 1) > 0", "True",
       "survivors::test_ema_and_swa_are_what_they_say")
mutant("log: not cut back", "checkpoint", "self.file.truncate(self._kept_bytes(checkpoint))", "pass",
       "checkpoint::test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: evaluation after the checkpoint kept", "checkpoint", 'entry["epoch"] < checkpoint["epoch"] if',
       'entry["epoch"] <= checkpoint["epoch"] if', "survivors::test_evaluation_after_the_checkpoint_is_logged_once")
mutant("log: --eval-only cuts it", "checkpoint", "        if not args.eval_only:\n            if checkpoint and",
       "        if True:\n            if checkpoint and",
       "odd_tasks::test_eval_only_does_not_touch_the_log_of_a_run")
mutant("log: skipped steps counted twice", "checkpoint", "        state.scaler.skipped.zero_()\n", "", f"{NAN}[ddp-2]")
mutant("log: loss of the whole run", "checkpoint", "        self.meter.clear()\n", "",
       "survivors::test_logged_loss_is_that_since_the_last_line")
mutant("lock: none", "checkpoint", "fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", LAST + "31_rank_0_reads_and_decides")
mutant("schedule: stands still when a step is skipped", "checkpoint", "        state.scheduler.step()\n",
       "        if not state.scaler.in_a_row:\n            state.scheduler.step()\n", MANY + "22_skipped_steps_are_counted")
mutant("divergence: never ends", "checkpoint", "state.scaler.in_a_row >= MAX_SKIPPED_IN_A_ROW", "False", DIVERGED)
mutant("divergence: another exit code", "checkpoint", 'raise Stopped(3, f"diverged', 'raise Stopped(1, f"diverged', DIVERGED)
mutant("stop: every rank by itself", "checkpoint", "flag = int(agreed[1]) if agreed else 0", "flag = self.received", ONE + "11_sigterm_saves[0]")
mutant("stop: only if all ranks were told", "checkpoint", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.MIN, async_op",
       ONE + "11_sigterm_saves[0]")
mutant("stop: signals of the ranks added", "checkpoint", "dist.ReduceOp.MAX, async_op", "dist.ReduceOp.SUM, async_op",
       "survivors::test_signal_to_all_ranks_is_one_signal")
mutant("stop: without saving", "checkpoint", "if stop or (args.save_every and", "if (args.save_every and", f"{BITWISE}[single-1-9]")
for name in ("train_single", "train_dp", "train_ddp", "train_spawn", "launch"):
    mutant(f"{name}: Ctrl-C is left to Python", name, "signal.signal(signal.SIGINT, signal.SIG_DFL)", "None",
           f"signals::test_ctrl_c_ends_the_import_of_torch[{name}.py]")
mutant("stop: SIGTERM ends with 0", "options", "signal.SIGTERM: 143", "signal.SIGTERM: 0", ONE + "11_sigterm_saves[0]")
mutant("stop: SIGINT ends with 143", "options", "signal.SIGINT: 130", "signal.SIGINT: 143",
       LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("stop: SIGUSR1 ends with 138", "options", "signal.SIGUSR1: 0", "signal.SIGUSR1: 138",
       "survivors::test_signal_to_all_ranks_is_one_signal")

# ------------------------------------------------------------------------------------------------------ launch.py and options.py

mutant("launch: rank 0 of each machine writes", "launch", "dist.get_rank() == 0 if is_distributed()",
       'os.environ.get("LOCAL_RANK", "0") == "0" if is_distributed()', LAST + "32_one_rank_of_all_machines_saves")
mutant("launch: every rank prints", "launch", "    if is_rank0():\n        print(", "    if True:\n        print(",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("launch: bad arguments end with 1", "launch", 'announce_end(2, f"error', 'announce_end(1, f"error',
       "cli::test_bad_command_line_ends_with_code_2_and_one_line")
mutant("launch: a stop ends with 0", "launch", "announce_end(stop.code, f", "announce_end(0, f", ONE + "11_sigterm_saves[0]")
mutant("launch: leaves while others still talk to it", "launch", "        dist.barrier()", "        pass",
       f"{ENDINGS}early_end_of_all_ranks_waits_for_all")
mutant("launch: unused parameters not explained", "launch", 'if "find_unused_parameters=True" in str(error):', "if False:",
       MANY + "28_unused_parameters")
mutant("launch: ranks outlive torchrun", "launch", "    end_with_parent(signal.SIGKILL)\n    if os.getppid()",
       "    if os.getppid()",
       "signals::test_ranks_that_wait_before_training_end_with_the_launcher[ddp]")
mutant("launch: spawned ranks outlive the launcher", "launch",
       "    end_with_parent(signal.SIGKILL)\n    if not mp.parent_process().is_alive():", "    if not mp.parent_process().is_alive():",
       "signals::test_ranks_that_wait_before_training_end_with_the_launcher[spawn]")
mutant("launch: ranks without a launcher do not save", "checkpoint", "end_with_parent(signal.SIGTERM)", "pass",
       LAST + "39_nothing_outlives_torchrun")
mutant("launch: a Python that starts meets Ctrl-C", "launch", "    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    if args.dist_url",
       "    if args.dist_url",
       "signals::test_ctrl_c_while_spawned_processes_start_is_answered_without_a_traceback")
mutant("launch: a rank that is left by one that was stopped complains", "launch", "if lost and end and Path(end).exists():", "if False:",
       "endings::test_rank_that_is_left_by_one_that_was_stopped_leaves_in_silence")
mutant("launch: a signal before training is a failure", "launch",
       '"LAUNCH_END_FILE" not in os.environ or number != signal.SIGTERM:', '"LAUNCH_END_FILE" not in os.environ:',
       "signals::test_signal_to_one_rank_before_training_ends_the_run_and_restarts_nothing")
SLURM = LAST + "40_ranks_from_slurm", LAST + "40_address_from_slurm"
mutant("slurm: local rank for the rank", "options", 'RANK=slurm["PROCID"]', 'RANK=slurm["LOCALID"]', *SLURM)
mutant("slurm: a batch script is a rank", "options", '"SLURM_STEP_NODELIST" not in', '"SLURM_PROCID" not in', *SLURM)
mutant("slurm: ranks under torchrun are tasks", "options", '"RANK" in os.environ or "SLURM', '"SLURM', *SLURM)
mutant("slurm: nodes meet on localhost", "options", "first if len(tasks) > 1 else", "first if len(tasks) < 1 else", *SLURM)
mutant("slurm: nodes meet on the last one", "options", '.split(",")[0]', '.split(",")[-1]', *SLURM)
mutant("slurm: tasks of the first node on every node", "options", 'tasks[int(slurm["NODEID"])]', "tasks[0]", *SLURM)
mutant("slurm: tasks that each have a device are too many", "options", " and not by_srun", "",
       "cli::test_more_processes_than_accelerators_is_refused")
mutant("slurm: only the first task checks", "options", "(torchrun and os.environ", "(os.environ", "cli::test_every_task_of_srun_checks")
mutant("slurm: cores of other jobs", "common", 'int(os.environ.get("SLURM_CPUS_ON_NODE", cores))', "cores",
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("launch: a fixed place to meet", "launch", 'yield f"file://{folder}/ranks"', 'yield f"file://{tempfile.gettempdir()}/ranks"',
       MANY + "15_two_jobs_on_one_machine")
mutant("launch: unknown host waited for", "launch", "found = socket.getaddrinfo(host, None)[0][4][0]", 'found = ""',
       f"{REFUSED}[spawn-2 --nnodes 2 --node-rank 0 --dist-url tcp://no-such-host.invalid:29500]")
mutant("launch: a dead rank is success", "launch", 'return 1, "process {} left', 'return 0, "process {} left',
       ONE + "06_dead_rank_ends_the_job[exits 1]")
mutant("launch: a killed rank has no code of its own", "launch", "(128 - codes[rank] if -codes[rank] in SIGNALS else 1)",
       "128 - codes[rank]", f"{ENDINGS}end_of_spawned_processes_is_told_by_who_failed_first")
mutant("launch: signals not handed on", "launch", "os.kill(process.pid, number)", "pass", LAST + "39_nothing_outlives_the_launcher[SIGINT]")
mutant("launch: torchrun's code for the ranks' code", "launch", "code = int(written)", "code = 0",
       "signals::test_signal_to_one_rank_stops_all_ranks_at_the_same_step")
mutant("launch: no answer to signals from C++", "launch", "signal.set_wakeup_fd(writer, warn_on_full_buffer=False)", "pass",
       "signals::test_rank_that_waits_for_another_in_c_answers_signals")
mutant("launch: a forked process answers for its parent", "launch", "after_in_child=lambda: signal.set_wakeup_fd(-1)",
       "before=lambda: None",
       "signals::test_signal_to_a_forked_process_of_the_task_does_not_end_the_run")
mutant("launch: a signal is forgotten if nobody reads", "launch", "    finally:\n        os._exit(128 + number)",
       "    finally:\n        pass",
       "signals::test_signal_ends_a_run_that_cannot_say_so")
mutant("launch: the thread takes signals that the main thread blocks", "launch",
       "    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)\n    threading", "    threading", "signals::test_only_the_main_thread_takes_signals")
mutant("launch: torchrun answers signals to the end", "launch", "signal.signal(number, signal.SIG_IGN)", "pass",
       "signals::test_signal_when_all_is_done_changes_nothing")
mutant("launch: sys.exit(0) of a task is success", "launch", "        if code is None:\n", "        if False:\n",
       f"{ENDINGS}task_that_leaves_by_sys_exit_is_no_success[ddp-2]")
mutant("launch: sys.exit(0) ends a device's run with 0", "launch", "except SystemExit as error:", "except ZeroDivisionError as error:",
       f"{ENDINGS}task_that_leaves_by_sys_exit_is_no_success[single-1]")
mutant("launch: a signal before training kills without a word", "launch", "signal.signal(number, _end_at_once)", "pass",
       f"{ENDINGS}signal_before_training_ends_the_run_at_once")
mutant("launch: a deliberate end is restarted", "launch", 'get("LAUNCH_END_FILE")) and Path(end).exists():', 'get("")) and False:',
       f"{ENDINGS}rank_started_again_after_a_deliberate_end_does_nothing")
mutant("launch: the last word counts", "launch", 'open(path, "x")', 'open(path, "w")',
       f"{ENDINGS}rank_started_again_after_a_deliberate_end_does_nothing")
mutant("launch: a rank that ends alone ends with 0", "launch", "    if path and by_all:\n", "    if path:\n",
       f"{ENDINGS}rank_started_again_after_a_deliberate_end_does_nothing")
mutant("launch: what torchrun ends is taken for ended by the user", "launch",
       'if "LAUNCH_END_FILE" not in os.environ or number != signal.SIGTERM:', "if True:",
       f"{ENDINGS}signal_of_torchrun_before_training_is_not_the_end_of_the_run")
mutant("launch: a rank outlives a launcher that was killed before", "launch", 'os.environ.get("LAUNCH_PID", os.getppid())', "os.getppid()",
       f"{ENDINGS}rank_whose_launcher_was_killed_before_it_looked_ends")
mutant("launch: a task's own connection is taken for the ranks'", "launch", 'r"(gloo|NCCL|SocketImpl|Store).*(', 'r"(|)(',
       f"{ENDINGS}lost_connection_is_one_to_another_rank")
mutant("launch: the code of a rank that was ended for another's sake", "launch", "for code in (codes[first], *codes):",
       "for code in codes:",
       f"{ENDINGS}end_of_spawned_processes_is_told_by_who_failed_first")
mutant("launch: who was killed is forgotten for those who were then told to stop", "launch", "if codes[first] < 0 and", "if False and",
       f"{ENDINGS}end_of_spawned_processes_is_told_by_who_failed_first")
mutant("resume: from an older checkpoint leaves the newer last.pt", "checkpoint", 'path.resolve() !=', "None is",
       f"{ENDINGS}going_back_to_an_older_checkpoint_is_going_back")
mutant("resume: another run overwritten that ended meanwhile", "checkpoint", "if before != (last.exists()",
       "if before is last and (last.exists()", f"{ENDINGS}run_that_ended_while_this_one_was_starting_is_not_overwritten")
mutant("divergence: not seen at the end", "checkpoint", "MAX_SKIPPED_IN_A_ROW == 0 or state.step == self.steps_per_epoch",
       "MAX_SKIPPED_IN_A_ROW == 0",
       DIVERGED)
mutant("restart: by torchrun itself in a new folder", "checkpoint", 'not args.output_dir and os.environ.get', "False and os.environ.get",
       "survivors::test_restarted_process_goes_on_or_gives_up")
mutant("launch: the last words are not the error of a loader worker", "launch", "[-1 if \"DataLoader worker\" in lines[0] else 0]", "[0]",
       f"{ENDINGS}root_cause_under_torchrun")
mutant("resume: auto overwrites a run of which only the best is left", "checkpoint", "if not own and (other :=", "if False and (other :=",
       f"{ENDINGS}auto_does_not_start_over_a_run_of_which_only_the_best_is_left")
mutant("launch: the last words are a victim's", "launch", "        if LOST_CONNECTION.search(str(error)):", "        if False:",
       ONE + "06_dead_rank_ends_the_job[raises]")
mutant("launch: a victim is blamed under torchrun", "launch", "or bool(LOST_CONNECTION.search(str(failure.message)))", "or False",
       f"{ENDINGS}root_cause_under_torchrun")
mutant("launch: SIGTERM of torchrun is blamed", "launch", "failure.exitcode == -signal.SIGTERM or", "False or",
       f"{ENDINGS}root_cause_under_torchrun")
mutant("launch: a victim is blamed after a restart", "launch", "for message in messages if not LOST_CONNECTION.search(message)]",
       "for message in messages]",
       f"{ENDINGS}restarted_rank_tells_what_failed_before_the_first_checkpoint")
mutant("launch: ranks meet where dead ones did", "launch", "file://{file}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}",
       "file://{file}",
       f"{ENDINGS}ranks_meet_in_a_file_of_their_own_after_a_restart")
mutant("launch: ranks of one machine listen to all", "launch", "set_variable(name, os.environ.get(name, \"lo\"))", "pass",
       "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("launch: options checked by the ranks", "launch", "    check_run(args)  # here", "    # here",
       "nodes::test_several_nodes_are_checked_before_anything_is_started")
mutant("launch: torchrun listens to all", "launch", "[*meet, *start,", '["--standalone", *start,',
       "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("resume: another training set not noticed", "checkpoint", 'checkpoint["samples"] != samples and', "False and",
       f"{ENDINGS}checkpoint_of_other_data_or_another_model_is_refused")
mutant("resume: a model that does not fit is a traceback", "checkpoint",
       "except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:", "except ZeroDivisionError as error:",
       f"{ENDINGS}checkpoint_of_other_data_or_another_model_is_refused")
mutant("save: whatever a task puts into its arguments", "checkpoint", "if isinstance(value, (int, float, str, list, type(None)))}", "}",
       f"{ENDINGS}what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint")
mutant("load: values not looked at", "checkpoint", "    wrong = [name", "    wrong = [] and [name",
       f"{REFUSED}[single-1 --resume TMP/format.pt]")
mutant("load: negative positions", "checkpoint", "if kind is int and checkpoint[name] < 0]", "if False]",
       f"{REFUSED}[single-1 --resume TMP/negative.pt]")
mutant("load: a compressed file may fill the memory", "common", "member.compress_type != zipfile.ZIP_STORED", "False",
       "security::test_compressed_file_is_refused_unread")
mutant("log: a foreign line ends the run", "checkpoint", "except (ValueError, KeyError, TypeError):", "except ValueError:",
       "checkpoint::test_line_of_another_program_in_the_log_is_cut_off")
mutant("scaler: a NaN stays in BatchNorm", "common", "torch.where(bad > 0, kept", "torch.where(bad > 2, kept",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: BatchNorm goes back to before the resume", "common", "torch.cat(buffers, out=kept)  # of the", "pass  #",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("scaler: ten in a row are forgotten", "common", "self.in_a_row < MAX_SKIPPED_IN_A_ROW,", "self.in_a_row < 99,",
       f"{ENDINGS}ten_skipped_steps_in_a_row_are_remembered")
mutant("data: --skip-corrupt ignored", "loading", "if not self.skip_corrupt:", "if True:",
       f"{ENDINGS}broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: the replacement is drawn as the broken one", "loading", "seed_generators(mix(self.seed, epoch, index))",
       "seed_generators(mix(self.seed, epoch, first))",
       f"{ENDINGS}broken_sample_is_named_or_replaced_alike_everywhere")
mutant("data: a broken file is not named", "task", 'raise OSError(f"{os.fsdecode(paths[0])}: {error}") from None', "raise",
       f"{ENDINGS}broken_image_file_is_named")
mutant("workers: start when the ranks have met", "loading", "        processes = iter(loader)._workers\n", "        processes = []\n",
       f"{ENDINGS}workers_start_before_there_are_threads_whose_locks_a_fork_would_copy[ddp]")
mutant("workers: load what is not wanted", "loading", "        sampler = _Late(sampler)\n", "        sampler.begun = True\n",
       f"{ENDINGS}workers_load_nothing_that_a_resumed_run_skips")
mutant("launch: SIGUSR1 unknown to torchrun", "launch", "signal.signal(signal.SIGUSR1, hand_on)", "pass",
       "signals::test_signal_to_the_launcher_saves_and_ends_with_its_code[ddp-2-10]")
mutant("restart: begins anew", "checkpoint", 'args.resume == "auto" or restarted():', 'args.resume == "auto":',
       "survivors::test_restarted_process_goes_on_or_gives_up")
mutant("restart: an early failure is repeated", "checkpoint", "if restarted() and not own:", "if False:",
       "survivors::test_restarted_process_goes_on_or_gives_up")
mutant("restart: refused because its folder holds a run", "options", "and not restarted() and (Path", "and (Path",
       "survivors::test_restarted_process_goes_on_or_gives_up")
mutant("launch: --timeout in minutes", "launch", "timedelta(seconds=args.timeout)", "timedelta(minutes=args.timeout)",
       "survivors::test_timeout_reaches_the_process_group[ddp-2]")

mutant("options: batch size not compared with devices", "options", "if args.batch_size < world_size * args.accum_steps:", "if False:",
       f"{REFUSED}[ddp-65 ]")
mutant("options: accumulation not counted", "options", "if args.batch_size < world_size * args.accum_steps:",
       "if args.batch_size < world_size:", f"{REFUSED}[single-1 --accum-steps 65]")
mutant("options: --local_rank unknown", "options", '"--local-rank", "--local_rank", type', '"--local-rank", type',
       "cli::test_local_rank_is_accepted_in_both_spellings[--local_rank=3]")
mutant("options: booleans cannot be turned off", "options", '"action": argparse.BooleanOptionalAction', '"action": "store_true"',
       "cli::test_booleans_can_be_turned_off_and_help_is_readable[single]")
mutant("options: abbreviations accepted", "options", "allow_abbrev=False, format", "allow_abbrev=True, format",
       f"{REFUSED}[single-1 --batch 32]")
mutant("options: infinity is a number", "options", "or not math.isfinite(value)", "", f"{REFUSED}[single-1 --lr inf]")
mutant("options: a run is overwritten", "options", "and not restarted() and (Path", "and not True and (Path",
       f"{REFUSED}[single-1 --output-dir TMP/run]")
mutant("options: more processes than accelerators", "options", "local_world_size > available and", "False and",
       "cli::test_more_processes_than_accelerators_is_refused")
mutant("options: sync-bn in data parallel", "options", 'if mode == "dp" and args.sync_bn:', "if False:", f"{REFUSED}[dp-2 --sync-bn]")
mutant("options: fp16 and float64 together", "options", 'if args.amp != "off" and args.dtype == "float64":', "if False:",
       f"{REFUSED}[single-1 --amp fp16 --dtype float64]")
mutant("options: a task without metrics", "options", '"per_sample_loss", "per_sample_metrics"]', '"per_sample_loss"]',
       f"{REFUSED}[single-1 --task TMP/three.py]")
mutant("options: keyword-only options of a task not filled in", "options", "option: getattr(args, option) for option in options",
       "option: 0.0 for option in options", "survivors::test_label_smoothing_reaches_the_loss")

# --------------------------------------------------------------------------------------------------------- replicas.py, task.py

mutant("replicas: buffers shared", "replicas", "buffer.clone() if r else buffer", "buffer",
       "survivors::test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: buffers never updated", "replicas", "buffer.clone() if r else buffer", "buffer.clone()",
       "survivors::test_data_parallel_is_ddp_with_batchnorm")
mutant("replicas: all drop the same units", "replicas", "common.seed_generators(seed + r)",
       "common.seed_generators(seed)", f"{MASKS}[dp-2]")
mutant("replicas: cut otherwise than torch does", "replicas", "tensor.chunk(most)[r]", "tensor.tensor_split(most)[r]",
       LAST + "29_data_parallel_gathers_losses")
mutant("replicas: first outputs twice", "replicas", "torch.cat(outputs)",
       "torch.cat([outputs[0], *outputs[:-1]])", f"{EQUAL}[dp-2-1]")
mutant("sync-bn: gradient not summed", "replicas", "        dist.all_reduce(gradient)\n", "", "sync_batchnorm::test_all_reduce_gradient[2]")
mutant("sync-bn: input changed in place", "replicas", "        value = value.clone()\n", "", "sync_batchnorm::test_all_reduce_gradient[2]")
mutant("sync-bn: biased running variance", "replicas", "variance * (n / (n - 1))", "variance", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: variance of the rank alone", "replicas", "AllReduceSum.apply(centred.square().sum(dims)) / n",
       "centred.square().mean(dims)", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: mean of the ranks' means", "replicas", "torch.cat([value.sum(dims), count])",
       "torch.cat([value.mean(dims), torch.ones_like(count)])", f"{SYNC_BN}[1d-default-2]")
mutant("sync-bn: momentum None", "replicas", "1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum",
       "self.momentum or 0.1", f"{SYNC_BN}[1d-momentum None-2]")
mutant("sync-bn: statistics of the batch in evaluation", "replicas", "if not self.training or not (", "if not (",
       f"{SYNC_BN}[1d-default-2]")

mutant("task: augmentation without the epoch", "task", "(self.seed, self.epoch, index, 3)", "(self.seed, 0, index, 3)",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: augmentation by the place in the batch", "task", "self.epoch, index, 3)", "self.epoch, np.arange(len(index)), 3)",
       f"{AUGMENTED}[0-3-0-in memory]")
mutant("task: augmentation without the seed", "task", "shift=1, seed=args.seed)", "shift=1)",
       "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: held-out images augmented", "task", "ImagesInMemory(images[1437:], labels[1437:])",
       "ImagesInMemory(images[1437:], labels[1437:], shift=1)", "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: trained on held-out images", "task", "ImagesInMemory(images[:1437], labels[:1437]", "ImagesInMemory(images, labels",
       "sampling::test_digits_are_split_as_the_licence_note_says")
mutant("task: label smoothing ignored", "task", ", label_smoothing=label_smoothing)", ")",
       "survivors::test_label_smoothing_reaches_the_loss")
mutant("task: top1 is the worst guess", "task", '"top1": hits[:, 0]', '"top1": hits[:, -1]', "survivors::test_metrics_of_the_default_task")
mutant("task: shift to one side only", "task", "* windows.shape[2]).astype(int)", "* (windows.shape[2] // 2 + 1)).astype(int)",
       "sampling::test_shift_moves_the_image_by_at_most_one_pixel")

NEW = "data_and_models::test_"
mutant("balanced: every sample equally often", "loading", "if not self.classes:", "if True:",
       f"{NEW}balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: the first of each class alone", "loading", "+ member.long()]", "]",
       f"{NEW}balanced_draws_every_class_equally_often_and_every_sample_of_it")
mutant("balanced: without targets, not balanced", "loading", "if len(targets) != length or targets.ndim != 1:", "if False:",
       f"{NEW}balanced_needs_the_class_of_each_sample")
mutant("balanced: not resumed as such", "checkpoint", '"skip_corrupt", "weights"}', '"skip_corrupt", "weights", "balanced"}',
       "checkpoint::test_changed_option_that_would_change_the_run_is_refused_by_name[--balanced]")
mutant("task: every image mirrored", "task", "mirrored = draws[:, 2] < 0.5", "mirrored = draws[:, 2] < 1.5",
       f"{NEW}flip_mirrors_about_every_second_image_and_shift_cuts_a_window")
mutant("task: --download by all at once", "task", "common.one_at_a_time(args.data_dir) if args.download else contextlib.nullcontext()",
       "contextlib.nullcontext()", f"{NEW}torchvision_sets_are_downloaded_under_the_lock")
mutant("download: no lock", "common", "fcntl.flock(descriptor, fcntl.LOCK_EX)", "pass", f"{NEW}one_process_at_a_time_downloads")
mutant("weights: not loaded", "common", "    net.load_state_dict(fitting, strict=False)\n", "",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: prefixes kept", "common", 'name = name.partition(".")[2]', "break",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: what is left out is not named", "common", "for name in [name for name in own if name not in fitting]:", "for name in []:",
       f"{NEW}weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: none that fits is accepted", "common", "    if not fitting:", "    if False:",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("weights: ignored in a run", "common", "load_weights(args, net, read_tensors(args.weights, old=True))", "pass",
       f"{NEW}weights_are_where_training_starts_in_every_mode[single-1]")
mutant("freeze: BatchNorm keeps learning", "common", "            module.eval()\n", "            pass\n",
       f"{NEW}frozen_batchnorm_keeps_its_statistics[ddp-2]")
mutant("freeze: BatchNorm that is half frozen does not learn", "common", "if parameters and not any(parameter.requires_grad",
       "if parameters and not all(parameter.requires_grad", f"{NEW}frozen_batchnorm_keeps_its_statistics[single-1]")
mutant("swa: statistics not estimated", "common", 'if run.args.average != "swa" or not', "if True or not",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
mutant("swa: statistics of the next epoch", "common", "run.sampler.set_position(run.state.epoch, 0)",
       "run.sampler.set_position(run.state.epoch + 1, 0)",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
mutant("swa: statistics of the last batches", "common", "        norm.momentum = None  # a mean over all batches\n", "",
       f"{NEW}swa_statistics_are_those_that_torch_estimates")
for mode, n in (("dp", 2), ("ddp", 3), ("spawn", 2)):
    mutant(f"{mode}: statistics of the average not estimated", f"train_{mode}",
           '        run.save("last.pt")\n        common.update_bn(', '        run.save("last.pt")\n        str(',
           f"{NEW}swa_statistics_are_the_same_in_every_mode[{mode}-{n}-{'others0' if mode == 'dp' else 'None'}]")
for mode in ("single", "dp"):
    mutant(f"{mode}: options not checked", f"train_{mode}", "    common.check_run(args)\n", "", f"{NEW}script_alone_checks_too[{mode}]")
mutant("ddp: options not checked", "train_ddp", "    common.check_run(args)\n", "", f"{NEW}script_alone_checks_too[ddp]")
mutant("check: in the process of the run", "options", "    if (child := os.fork()) == 0:",
       "    return _check_run(args, device_type)\n    if (child := 0):",
       f"{NEW}check_starts_no_thread_and_draws_no_random_number", f"{NEW}check_leaves_no_trace_in_the_state_of_the_task[single-1]")
mutant("check: switched off by another launcher", "options", '("RANK", "LOCAL_RANK")', '("RANK",)',
       "cli::test_rank_of_an_outer_launcher_does_not_switch_the_check_off[single]")
mutant("check: says what the run will say again", "options", "contextlib.redirect_stdout(io.StringIO())", "contextlib.nullcontext()",
       f"{NEW}check_is_silent")
mutant("swa: every rank evaluates its own statistics", "common", "        sync_buffers(model)\n", "        pass\n",
       "survivors::test_buffers_of_an_average_are_evaluated_alike_by_eval_only[ddp]")
mutant("weights: what was trained, not the average", "common", 'average.get("n_averaged", 0) > 0', "False",
       f"{NEW}weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: an average that has not begun", "common", 'average.get("n_averaged", 0) > 0', "True",
       f"{NEW}weights_of_a_checkpoint_are_its_average_once_there_is_one")
mutant("weights: any name is a prefix", "common", "while name not in own and name.startswith(", "while name.startswith(",
       f"{NEW}prefix_that_is_a_name_of_the_model_stays")
mutant("weights: rounded to float32 first", "common", "task.build_model(args).to(getattr(torch, args.dtype))", "task.build_model(args)",
       f"{NEW}weights_keep_their_precision")
mutant("scaler: a skipped batch is counted", "common", ', ("num_batches_tracked",)]', "]",
       f"{ENDINGS}skipped_step_leaves_no_trace_in_batchnorm")
mutant("swa: a batch that is not finite counts", "common", "torch.where(finite, buffer, old)", "buffer",
       f"{NEW}batch_that_is_not_finite_is_left_out_of_swa_statistics[single-1]")
mutant("swa: seeded by whoever loads", "common", "seed_rng(run.args.seed, run.state.global_step + step, i, rank)", "pass",
       f"{NEW}swa_statistics_behind_dropout_do_not_depend_on_who_loads[single-1-1]")
mutant("swa: statistics in the middle of an epoch", "common", "not run.state.average.n_averaged or run.state.step < run.steps_per_epoch",
       "not run.state.average.n_averaged", f"{NEW}interrupted_swa_goes_on_bitwise")
for mode in ("single",):
    mutant(f"{mode}: an average evaluated without its statistics", f"train_{mode}",
           "    if args.eval_only:\n        common.update_bn(", "    if args.eval_only:\n        str(",
           f"{NEW}evaluation_of_a_checkpoint_from_before_its_evaluation_is_that_evaluation")
mutant("load: a file is taken for none", "common", 'zipped = file.read(4) == b"PK\\3\\4"', "zipped = zipfile.is_zipfile(path)",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("weights: NaN accepted", "common", "    if bad := [name for name, value in fitting",
       "    if False and [name for name, value in fitting",
       f"{NEW}weights_that_do_not_fit_at_all_or_are_damaged_are_refused")
mutant("image: the lower byte of sixteen bits", "task", 'image.mode.startswith("I")', "False",
       f"{NEW}files_that_torchvision_cannot_decode_are_read_by_pil")
JPEGS = f"{NEW}jpeg_files_are_decoded_together_and_each_as_if_alone"
mutant("images: decoded one by one", "task", "step = 16 if self.small else 1", "step = 1", JPEGS)
mutant("images: a whole batch of photographs in memory", "task", "16 if self.small else 1", "16", JPEGS)
mutant("images: one of another kind ends the run", "task", "(Exception):  # one is no", "(KeyError):  #", JPEGS)
mutant("data: a broken image in a batch ends the run", "loading", "        except OSError:\n            readable",
       "        except KeyError:\n            readable",
       f"{NEW}broken_image_is_named_or_replaced_in_a_whole_batch_too")
mutant("tensorboard: left open", "checkpoint", "            self.writer.close()\n", "            pass\n",
       f"{NEW}tensorboard_shows_images_and_what_they_are_taken_for[single-1]")
mutant("tensorboard: any targets are classes", "checkpoint",
       "if all(isinstance(value, Tensor) for value in (outputs, targets)) and outputs",
       "if outputs", f"{NEW}tensorboard_takes_a_task_with_nested_targets")
BY_VALUE = f"{NEW}small_tensors_of_a_worker_come_by_value"
mutant("worker: small tensors in shared memory", "loading", "if tensor.nbytes <= by_value and", "if False and", BY_VALUE)
mutant("worker: large tensors by value", "loading", "if tensor.nbytes <= by_value and", "if", BY_VALUE)
mutant("worker: by value where a thread pins", "loading", "FITS_THE_PIPE if pin else BY_VALUE", "BY_VALUE", f"{BY_VALUE}[cuda-shared1]")
mutant("worker: turned tensors are turned back", "loading", " and tensor.is_contiguous():", ":", BY_VALUE)
mutant("powersgd: buckets overtake one another", "common", "(future := powerSGD_hook.powerSGD_hook(state, bucket)).wait()",
       "future = powerSGD_hook.powerSGD_hook(state, bucket)",
       f"{NEW}buckets_that_powersgd_sends_do_not_overtake_one_another")

# ------------------------------------------------------------------------------------------------------------- several nodes
TOLD, LOST_NODE = "nodes::test_ranks_that_mean_different_runs_are_told", "nodes::test_lost_node_ends_the_job_which_goes_on_later"
SEVERAL = "nodes::test_several_nodes_are_checked_before_anything_is_started"
mutant("nodes: ranks are not compared", "checkpoint", "        check_agreement(args, sampler.length, val_sampler.length, device)\n", "",
       f"{TOLD}[seed]")
mutant("nodes: evaluation sets are not compared", "checkpoint", "check_agreement(args, sampler.length, val_sampler.length, device)",
       "check_agreement(args, sampler.length, 0, device)", f"{TOLD}[evaluation set]")
mutant("nodes: code is not compared", "checkpoint", "Path(name).read_bytes() for name in files", "b'' for name in files",
       f"{TOLD}[code]")
mutant("nodes: folders are compared", "checkpoint", 'OWN = {"data_dir", "download", "output_dir",', 'OWN = {"data_dir", "download",',
       "nodes::test_what_belongs_to_a_node_may_differ")
mutant("nodes: only one rank finds the difference", "checkpoint",
       "            problem.by_all = True\n            raise problem\n\n\ndef non",
       "            problem.by_all = True\n            if is_rank0():\n                raise problem\n\n\ndef non", f"{TOLD}[seed]")
mutant("nodes: who has not come is a traceback", "launch",
       "        if meeting and NOT_MET.search", "        if False and NOT_MET.search",
       "nodes::test_rank_that_cannot_start_does_not_leave_the_other_waiting",
       "nodes::test_spawned_ranks_whose_partners_never_come_say_so")
mutant("nodes: launchers wait for ten minutes", "launch", '"--rdzv-conf", f"timeout={math.ceil(timeout)}", ', "",
       "nodes::test_node_whose_partner_never_comes_says_so")
mutant("nodes: launchers restart ranks", "launch", 'timeout={math.ceil(timeout)}", "--max-restarts", "0"]',
       'timeout={math.ceil(timeout)}", "--max-restarts", "3"]', f"{LOST_NODE}[run_sh-cut]")
mutant("nodes: gloo listens at the host's name", "launch", "                if socket.inet_ntoa(answer[20:24]) == own:\n",
       "                if False:\n", f"{LOST_NODE}[run_sh-cut]")
mutant("nodes: spawned ranks listen at the host's name", "launch", "        use_interface_to(urlsplit(args.dist_url).hostname)\n", "",
       f"{LOST_NODE}[spawn-killed]")
mutant("nodes: SIGUSR1 waits for the other nodes", "launch",
       "in (signal.getsignal(number[0]), launcher and signal.getsignal(signal.SIGTERM))", "in (signal.getsignal(number[0]),)",
       "nodes::test_launcher_that_waits_for_the_others_can_be_stopped")
mutant("nodes: an error of one process is nobody's absence", "launch", 'meeting = "RANK" in os.environ and', "meeting =",
       "nodes::test_ranks_that_cannot_reach_each_other_say_so")
mutant("stop: ranks that do not save say that it was saved", "checkpoint", "not broadcast_object(self.refused)", "not self.refused",
       "nodes::test_stop_that_was_not_saved_is_not_called_saved_on_any_node")
mutant("nodes: a lost node is not called so", "launch",
       "    if several and (LOST_CONNECTION.search", "    if False and (LOST_CONNECTION.search",
       f"{LOST_NODE}[run_sh-cut]")
mutant("nodes: only the first node says why", "launch",
       '(not by_all or int(os.environ.get("LOCAL_RANK", 0)) == 0)', "(not by_all or is_rank0())",
       "nodes::test_each_node_says_why_it_ends")
mutant("nodes: a node without a number is the first", "options", "args.nnodes > 1 and args.node_rank is None", "False", REFUSED)
mutant("nodes: a node waits in silence", "launch", "        say_where_nodes_meet(args.node_rank, args.nnodes, args.dist_url)\n", "",
       "pitfalls_29_42::test_pitfall_40_two_launchers_are_one_job")
mutant("nodes: any address is the first node's", "launch", "        if node_rank == 0:\n", "        if False:\n",
       SEVERAL, "nodes::test_url_of_the_first_node_is_checked_too")
mutant("nodes: --master-addr is not checked", "launch", "    if nodes.nnodes > 1:\n        check", "    if False:\n        check", SEVERAL)
mutant("nodes: a batch is cut for one node", "launch", "devices * nodes.nnodes, devices)", "devices, devices)", SEVERAL)
mutant("nodes: options without --nnodes are forgotten", "options", "if nodes.nnodes is None else ()",
       "if nodes.nnodes == 0 else ()", SEVERAL)
mutant("nodes: an address with a port", "options", 'if nodes.master_addr and not re.fullmatch', 'if False and not re.fullmatch', SEVERAL)
mutant("nodes: the loopback is as good as any address", "launch", 'if nnodes > 1 and found.startswith("127.") and', "if False and",
       "nodes::test_name_that_is_the_loopback_here_is_refused")
mutant("nodes: a launcher waits for one that was stopped", "launch",
       'return 0 if os.environ.get("LAUNCH_MEETING_FILE") else int(bool(message))',
       "return 0", "nodes::test_signal_to_one_launcher_stops_all_of_them")
mutant("nodes: a launcher that waits leaves its files", "launch", '.pop("LAUNCH_END_FILE")).parent, ignore', '["LAUNCH_END_FILE"]), ignore',
       "nodes::test_launcher_that_waits_for_the_others_can_be_stopped")
mutant("nodes: no way between the ranks is a traceback", "launch", "|connectFullMesh", "",
       "nodes::test_ranks_that_cannot_reach_each_other_say_so")
mutant("nodes: silence of a node is not its loss", "launch", ' or "Timed out waiting" in str(failure.message)', "",
       "endings::test_root_cause_under_torchrun")
mutant("nodes: other nodes are to blame on one machine", "launch", "    if several and (LOST_CONNECTION.search",
       "    if (LOST_CONNECTION.search", "endings::test_on_one_machine_no_other_node_is_to_blame")
mutant("nodes: what a task put into args is compared", "checkpoint",
       "getattr(args, name, None) for name in known if", "getattr(args, name, None) for name in vars(args) if",
       "endings::test_what_a_task_puts_into_its_arguments_does_not_spoil_the_checkpoint")

# What is unusual but right, and what cannot be right (tests/test_odd_tasks.py)
ODD = "odd_tasks::test_"
BY_DESIGN, NOISE = f"{ODD}buffers_by_design_survive_training_averages_and_saves", f"{ODD}pitfall_49_what_is_drawn_in_an_evaluation"
for mode in ("single", "dp", "ddp", "spawn"):
    n = {"single": 1, "dp": 2, "ddp": 2, "spawn": 3}[mode]
    mutant(f"{mode}: not saved before the evaluation", f"train_{mode}", '        run.save("last.pt")', "        str()",
           *([f"{ODD}interrupted_evaluation_is_made_again_and_the_same[{mode}-{n}-9]"] if mode in ("single", "ddp") else
             [f"{ODD}run_is_saved_before_each_evaluation[{mode}-{n}]"]))
    mutant(f"{mode}: evaluation not seeded", f"train_{mode}", "common.seed_evaluation(args.seed, i)", "str()",
           f"{ODD}evaluation_repeats_what_it_draws[{mode}-{n}]")
    mutant(f"{mode}: leaves traces in the process", f"train_{mode}", "@common.leaves_no_trace", "@(lambda main: main)",
           f"{ODD}every_main_leaves_no_trace")
mutant("by design: nothing is", "common", "    if before is None:\n        return True\n    before", "    return True\n    before",
       f"{BY_DESIGN}[none-single-1]", f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: the whole tensor", "common", "return not (value.isfinite() | (value == before) |", "return not (before.isfinite().logical_not().any() |",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: NaN becomes infinite", "common", "| (value.isnan() & before.isnan())", "| before.isnan()",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: a NaN is not", "common", " | (value.isnan() & before.isnan())", "",
       f"{ODD}became_non_finite_compares_place_by_place")
mutant("by design: no weights with a mask", "common", "became_non_finite(value.to(own[name].dtype), own[name])",
       "became_non_finite(value.to(own[name].dtype), None)", f"{ODD}weights_with_values_by_design_are_loaded")
mutant("by design: judged in the precision of the file", "common", "became_non_finite(value.to(own[name].dtype), own[name])",
       "became_non_finite(value, own[name])", "data_and_models::test_weights_keep_their_precision")
mutant("by design: taken from the end of the run", "checkpoint", "non_finite(checkpoint, self.state.by_design)",
       "non_finite(checkpoint, self.state.net.state_dict())", f"{ODD}what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: a run that could not be saved ends well", "checkpoint", "        if refused:\n", "        if False:\n",
       f"{ODD}what_became_non_finite_is_never_saved_and_the_run_does_not_end_well[single-1]")
mutant("save: the other ranks end well", "checkpoint", "refused = broadcast_object(self.refused)", "refused = self.refused",
       f"{ODD}ranks_of_a_run_that_could_not_be_saved_end_alike")
mutant("save: a refused score is the best", "checkpoint", "earlier if self.refused else state.best", "state.best",
       f"{ODD}refused_save_does_not_raise_the_best_score")
mutant("ema: all buffers averaged", "common", "else get_ema_multi_avg_fn(decay))",
       "else get_ema_multi_avg_fn(decay), use_buffers=True)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the variance is a copy", "common", "for buffer in (norm.running_mean, norm.running_var)", "for buffer in (norm.running_mean,)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: statistics forget twice as slowly", "common", "self.statistics, 1 - self.decay)", "self.statistics, (1 - self.decay) / 2)",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
mutant("ema: the first statistics count a hundredth", "common", "started, before = int(self.n_averaged) > 0,", "started, before = True,",
       f"{ODD}ema_averages_parameters_and_statistics_and_copies_the_rest")
MORE_EPOCHS = f"{ODD}swa_with_more_epochs_averages_what_a_run_of_that_length_averages"
mutant("swa: an average that begins too early is kept", "checkpoint", "state.average.n_averaged != wanted and not", "False and not",
       f"{MORE_EPOCHS}[4-12]")
mutant("swa: the last epoch before a resume is left out", "checkpoint", "                if wanted:  # one", "                if False:  # one",
       f"{MORE_EPOCHS}[5-6]")
mutant("swa: averages that are lost are not missed", "checkpoint", "if wanted not in (found, 0) and", "if False and",
       f"{ODD}swa_refuses_epochs_whose_average_is_lost")
mutant("swa: within an epoch the weights are taken for its end", "checkpoint", "not (wanted == 1 and ended and comes)", "not (wanted == 1 and comes)",
       f"{ODD}swa_refuses_epochs_whose_average_is_lost")
mutant("swa: names an epoch too low", "checkpoint", "math.ceil(4 * done / 3)", "4 * done // 3 - 1", f"{ODD}swa_refuses_epochs_whose_average_is_lost")
WRAPPED = f"{ODD}pitfall_48_wrapped_data_set_is_augmented_anew_in_every_epoch"
mutant("wrapped: wrappers hide the epoch", "loading", "for inner in _like_datasets(value)]", "for inner in ()]", f"{WRAPPED}[False-subset]")
mutant("wrapped: many attributes hide the epoch", "loading", "for value in getattr(one, \"__dict__\", {}).values()",
       "for value in [list(getattr(one, \"__dict__\", {}).values())]", f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("wrapped: only the first of several is told", "loading", "for value in inner for one in", "for value in list(inner)[:1] for one in",
       f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("wrapped: dictionaries hide the epoch", "loading", "(list, tuple, dict)", "(list, tuple)",
       f"{WRAPPED}[False-own]")
mutant("wrapped: a circle has no end", "loading", "        seen.add(id(one))\n", "", f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
mutant("evaluation: ranks draw alike", "loading", "i * world_size + rank)  # no", "i)  # no", f"{NOISE}_is_the_same_in_every_mode[ddp-2]")
mutant("evaluation: seeds of training", "loading", "seed_rng(seed, -1, i *", "seed_rng(seed, 0, i *",
       f"{ODD}seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("evaluation: batches depend on the world size", "loading", "math.ceil(length / 8))", "math.ceil(length / 8 / world_size))",
       f"{ODD}evaluation_batches_are_the_same_at_every_world_size")
mutant("evaluation: one rank has it all", "loading", "min(batch_size, math.ceil(length / 8))", "batch_size",
       f"{ODD}evaluation_batches_are_the_same_at_every_world_size")
mutant("evaluation: batches without a limit", "options", "min(128, args.batch_size // args.accum_steps)", "args.batch_size // args.accum_steps",
       f"{ODD}evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
mutant("evaluation: batches of a whole step", "options", "min(128, args.batch_size // args.accum_steps)", "min(128, args.batch_size)",
       f"{ODD}evaluation_batch_is_a_micro_batch_of_at_most_128_unless_it_is_said")
for generator in ("random.seed(bits)", "np.random.seed(bits % 2**32)", "torch.default_generator.manual_seed(bits)"):
    mutant(f"seeds: without {generator}", "loading", f"    {generator}\n", "", f"{ODD}seeds_of_an_evaluation_are_no_seeds_of_training")
mutant("stop: forgotten after an evaluation", "checkpoint", "        stop = self.stop.agreed(wait=True)\n", "        stop = None\n",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[single-1]")
mutant("stop: after an evaluation only what was agreed before", "checkpoint", "agreed = self.pending if wait else earlier", "agreed = earlier",
       f"{ENDINGS}signal_during_an_evaluation_finds_the_run_saved_and_stops_it_after_the_evaluation[ddp-2]")
mutant("stop: a run that is done is called stopped", "checkpoint", "if stop and state.epoch < self.args.epochs:", "if stop:",
       f"{ENDINGS}signal_in_the_last_evaluation_lets_the_run_end")
mutant("eval-only: writes into the log of a run", "checkpoint", "if args.eval_only and any(self.folder.glob(\"*.pt\")):", "if False:",
       f"{ODD}eval_only_does_not_touch_the_log_of_a_run")
mutant("eval-only: never writes a line", "checkpoint", "if args.eval_only and any(self.folder.glob(\"*.pt\")):", "if args.eval_only:",
       f"{ODD}eval_only_does_not_touch_the_log_of_a_run")
mutant("resume: best.pt stays behind", "checkpoint", 'save_checkpoint(load_checkpoint(name), self.folder / "best.pt")', "str()",
       f"{ODD}resume_in_another_folder_takes_best_along")
mutant("resume: any best.pt will do", "checkpoint", 'mmap=True)["best"] == best:', 'mmap=True)["best"] is not None:',
       f"{ODD}resume_of_an_earlier_checkpoint_does_not_take_a_later_best")
mutant("resume: a best score without its file", "checkpoint", 'checkpoint["best"] = None  # the', 'str()  # the',
       f"{ODD}best_pt_that_was_deleted_is_written_anew")
mutant("check: lazy modules pass", "options", "if lazy := [", "if lazy := [] and [", f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[lazy]")
mutant("check: complex numbers pass", "options", "if imaginary := [", "if imaginary := [] and [",
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[complex]")
mutant("check: complex buffers pass", "options", "[*net.named_parameters(), *net.named_buffers()]", "net.named_parameters()",
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[complex_buffer]")
mutant("check: names of metrics are not compared", "options", 'if only := ", ".join(sorted(set(metrics)', 'if only := "" and ", ".join(sorted(set(metrics)',
       f"{ODD}task_that_cannot_be_right_is_refused_before_the_run[last_lacks]")
mutant("meter: a new name is welcome", "common", "if self.sums and self.sums.keys() != values.keys():", "if False:",
       f"{ODD}metric_of_some_batches_alone_ends_the_run[single-1]")
mutant("meter: names of other ranks are dropped", "common", "if self.sums and self.sums.keys() != set(names):", "if False:",
       f"{ODD}names_that_one_rank_alone_has_are_an_error_and_an_empty_rank_is_none")
mutant("options: --image-size without effect", "task", "if args.image_size and args.dataset not in", "if False and args.dataset not in",
       f"{ODD}image_size_without_effect_is_refused[digits-folder0]")
mutant("options: PowerSGD under a changing scale", "options", 'if args.grad_compress == "powersgd" and args.amp == "fp16":', "if False:",
       f"{ODD}power_sgd_with_a_changing_scale_is_refused")
for name in ("error_dict", "p_memory_dict"):
    mutant(f"powersgd: {name} keeps a NaN", "common", f"                state.{name}.clear()\n", "", f"{ODD}power_sgd_forgets_a_nan")
mutant("powersgd: nothing is forgotten", "common", "if bucket.index() == 0 and scaler.in_a_row > 0:", "if False:", f"{ODD}power_sgd_forgets_a_nan")
mutant("cyclic: the warm-up passes the start", "common", '(args.step_gamma if args.schedule == "cyclic" else 1)', "1",
       f"{ODD}cyclic_schedule_has_no_cliff")
mutant("cyclic: begins with the warm-up", "common", "((step - warmup) % cycle)", "(step % cycle)", f"{ODD}cyclic_schedule_has_no_cliff")
mutant("cyclic: one cycle ends after the run", "common", "else max(1, last - warmup)", "else last", f"{ODD}cyclic_schedule_has_no_cliff")
mutant("ends: a rank leaves before the others know", "launch", "        if error.by_all:\n            wait_for_all()\n", "",
       f"{ENDINGS}early_end_of_all_ranks_waits_for_all")
TRACES = f"{ODD}main_can_be_called_from_a_notebook_or_a_thread_and_leaves_no_trace"
for name, file, old, new in (
    ("nothing is put back", "launch", "            undo_all()\n", ""),
    ("handlers stay", "launch", "        undo_at_end(signal.signal, number,", "        str("),
    ("a thread sets handlers", "launch", "for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():", "for number in SIGNALS:"),
    ("variables stay", "options", "    undo_at_end(_put_variable, name, os.environ.get(name))\n", ""),
    ("threads stay", "common", "        undo_at_end(torch.set_num_threads, torch.get_num_threads())\n", ""),
    ("deterministic kernels stay", "common", "    undo_at_end(functools.partial(torch.use_deterministic_algorithms, strict, warn_only=warn))\n", ""),
    ("deterministic kernels come back strict", "common", "strict, warn_only=warn", "strict"),
    ("benchmark stays", "common", '    undo_at_end(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)\n', ""),
    ("Python's generator stays seeded", "launch", "            random.setstate(draws)\n", ""),
    ("numpy's generator stays seeded", "launch", "            np.random.set_state(numpy_draws)\n", ""),
    ("torch's generator stays seeded", "launch", ", torch.random.fork_rng():", ":"),
    ("no argument has a name", "launch", "def wrapper(*arguments: Any, **named_arguments: Any)", "def wrapper(*arguments: Any, **named_arguments: None)"),
)[:-1]:
    mutant(f"traces: {name}", file, old, new, TRACES)
mutant("traces: the lock stays", "checkpoint", "        undo_at_end(lambda: log() and log().close())\n", "", f"{ODD}main_can_go_on_where_a_stop_ended_it")
mutant("average: infinite parameters become NaN", "common", "for i in self.infinite:", "for i in ():",
       f"{ODD}average_of_parameters_that_are_infinite_by_design[ema]")
mutant("average: a parameter with an infinity is a copy", "common", "torch.where(parameters[i].isfinite(), averages[i], parameters[i])", "parameters[i]",
       f"{ODD}average_of_parameters_that_are_infinite_by_design[swa]")
mutant("swa: an average that nobody evaluates", "checkpoint", " and ended and comes)", " and ended)", f"{ODD}swa_refuses_epochs_whose_average_is_lost")
mutant("resume: last.pt before best.pt", "checkpoint", "            if checkpoint and checkpoint[\"best\"] is not None and not", "            if False and not",
       f"{ODD}best_is_in_the_new_folder_before_last")
mutant("stop: SLURM's warning ends well although nothing was saved", "checkpoint", "SIGNALS[number] or int(not saved)", "SIGNALS[number]",
       f"{ODD}warning_of_slurm_ends_with_1_if_the_run_could_not_be_saved")
EPOCH_ONCE = f"{ODD}set_epoch_is_called_once_an_epoch_and_seeded"
mutant("wrapped: told in every batch", "loading", 'if getattr(dataset, "_epoch_told", None) != epoch:', "if True:", EPOCH_ONCE)
mutant("wrapped: set_epoch is not seeded", "loading", "                seed_generators(mix(self.seed, epoch))\n", "", EPOCH_ONCE)
mutant("wrapped: names that are passed on count", "loading", "hasattr(type(dataset), \"__getitems__\")", "hasattr(dataset, \"__getitems__\")",
       f"{ODD}wrapper_that_passes_names_on_is_asked_itself")
mutant("wrapped: classes are taken for data sets", "loading", "isinstance(values, (Tensor, type))", "isinstance(values, Tensor)",
       f"{ODD}data_sets_with_epochs_finds_each_once_and_ends")
# ---------------------------------------------------------------------------------------------------------------- run.sh, plot.py

HALF_MADE = "run_sh::test_half_made_environment_is_made_anew"
NO_ENSUREPIP = "run_sh::test_python_without_ensurepip_is_told_what_to_install"
NUMBER = "run_sh::test_number_of_devices_is_n_or_the_option_or_the_default"
SHIM = "run_sh::test_python_that_a_shim_picks_in_the_users_folder_is_used_for_everything"
mutant("run.sh: any environment that has Python is whole", "run.sh",
       """! in_here -c 'import importlib.metadata as m; raise SystemExit(not m.files("pip"))' 2>/dev/null""",
       "[[ ! -x $python ]]", HALF_MADE)
mutant("run.sh: an environment that has half of pip is whole", "run.sh", 'not m.files("pip")', 'not m.version("pip")', HALF_MADE)
mutant("run.sh: what is half-made is kept", "run.sh", "-m venv --clear", "-m venv", HALF_MADE)
mutant("run.sh: a whole environment is made anew too", "run.sh", 'raise SystemExit(not m.files("pip"))', "raise SystemExit(1)", HALF_MADE)
mutant("run.sh: goes on without ensurepip", "run.sh", "'import ensurepip, venv' 2>/dev/null", "'import venv' 2>/dev/null", NO_ENSUREPIP)
mutant("run.sh: a link is taken for the project", "run.sh", 'readlink -f -- "', 'realpath -s -- "',
       "run_sh::test_link_to_run_sh_uses_the_folder_of_the_project")
mutant("run.sh: a shim is asked again and again", "run.sh", """python=$("$found" -I -c 'import sys; print(sys.executable)')""",
       "python=$found", SHIM)
mutant("run.sh: a shim is asked in the project", "run.sh", 'python=$("$found"', 'python=$(cd -- "$here" && "$found"', SHIM)
mutant("run.sh: dp without N has two replicas", "run.sh", '${devices:+--replicas "$devices"}', '--replicas "${devices:-2}"', NUMBER)
mutant("run.sh: spawn without N has two processes", "run.sh", '${devices:+--nproc "$devices"}', '--nproc "${devices:-2}"', NUMBER)
mutant("run.sh: spawn forgets N", "run.sh", '${devices:+--nproc "$devices"}', "", NUMBER)
mutant("devices: all cores for every process beside an accelerator", "common", 'if "OMP_NUM_THREADS" not in os.environ:',
       'if device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:',
       LAST + "38_workers_stay_and_cores_are_divided")
mutant("launch: a group without a default backend", "launch", 'return "gloo"  #', 'return "cpu:gloo"  #',
       "endings::test_group_on_the_cpu_has_a_default_backend_in_every_version")
mutant("plot: negative losses on a logarithmic axis", "plot", "if name in LOGARITHMIC and positive", "if name in LOGARITHMIC",
       "plot::test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")
mutant("plot: only the last run counts", "plot", "positive = positive and all(", "positive = all(",
       "plot::test_axis_is_logarithmic_only_where_all_values_of_all_runs_are_positive")

# ------------------------------------------- figures, the order of files, drift, photographs, half precision, two signals, bench

FIGURES, SAVES, DRIFT = "log_figures::test_", "save_order::test_", "drift::test_"
PHOTO, SUMS, TWO = "photographs::test_", "bench_sums::test_", "two_signals::test_"
SPEED = f"{FIGURES}speed_is_the_samples_since_the_last_line_over_the_seconds_since"
RESUMED_SPEED = f"{FIGURES}speed_after_a_resume_counts_what_this_process_trained_on"
RANKS_SPEED = f"{FIGURES}speed_and_loss_are_those_of_all_ranks"
PRINTED = f"{FIGURES}printed_line_is_what_was_logged"
BAR = f"{FIGURES}progress_bar_shows_the_position_and_the_figures"
SCALARS = f"{FIGURES}tensorboard_gets_the_figures_of_the_log"
mutant("speed: with what was trained on before the resume", "checkpoint", '(means["count"] - self.untimed) /', 'means["count"] /',
       RESUMED_SPEED)
mutant("speed: in images a millisecond", "checkpoint", "(now - self.clock)", "((now - self.clock) * 1000)", SPEED)
mutant("speed: since the start of the epoch", "checkpoint", "self.clock, self.untimed = now, 0", "self.untimed = 0", SPEED)
mutant("speed: less in every line after a resume", "checkpoint", "self.clock, self.untimed = now, 0", "self.clock = now", RESUMED_SPEED)
mutant("speed: of rank 0's samples before the resume", "checkpoint", 'self.untimed = sum(checkpoint["log"]["count"])',
       'self.untimed = checkpoint["log"]["count"][0]', RANKS_SPEED)
mutant("speed: with the evaluation", "checkpoint", "        self.clock = time.perf_counter()\n        if is_rank0() and",
       "        self.clock = getattr(self, 'clock', time.perf_counter())\n        if is_rank0() and", SPEED)
mutant("speed: of one rank", "checkpoint", '(means["count"] - self.untimed) /', "(self.meter.count - self.untimed) /", RANKS_SPEED)
mutant("log: epochs from 1", "checkpoint", '"epoch": state.epoch,\n', '"epoch": state.epoch + 1,\n', SPEED)
mutant("log: step of the run for that of the epoch", "checkpoint", '"step": state.step,\n', '"step": state.global_step,\n', SPEED)
mutant("log: steps of an epoch are counted for --log-every", "checkpoint", "if state.global_step % args.log_every == 0 or",
       "if state.step % args.log_every == 0 or", FIGURES + "speed_after_a_resume_counts_what_this_process_trained_on", SPEED)
mutant("log: an epoch's last step is not logged", "checkpoint",
       "if state.global_step % args.log_every == 0 or state.step == self.steps_per_epoch:",
       "if state.global_step % args.log_every == 0:", SPEED)
mutant("log: learning rate of the next step", "checkpoint",
       '        lr = state.optimizer.param_groups[0]["lr"]\n        state.scheduler.step()\n',
       '        state.scheduler.step()\n        lr = state.optimizer.param_groups[0]["lr"]\n',
       f"{FIGURES}learning_rate_and_norm_of_a_line_are_those_of_its_step")
mutant("log: norm rounded to float32", "checkpoint", '"grad_norm": grad_norm.item()', '"grad_norm": grad_norm.float().item()',
       f"{FIGURES}learning_rate_and_norm_of_a_line_are_those_of_its_step")
mutant("log: infinity is written", "checkpoint", "isinstance(value, float) and not math.isfinite(value)",
       "isinstance(value, float) and math.isnan(value)", f"{FIGURES}what_json_cannot_say_is_null")
mutant("print: epochs from 0", "checkpoint", 'position = f"epoch {state.epoch + 1}/', 'position = f"epoch {state.epoch}/', PRINTED)
mutant("print: step of the run for that of the epoch", "checkpoint", "step {state.step}/{self.steps_per_epoch}  ",
       "step {state.global_step}/{self.steps_per_epoch}  ", PRINTED)
mutant("print: samples for images/s", "checkpoint", "{line['images_per_s']:.0f} images/s", "{means['count']:.0f} images/s", PRINTED)
mutant("print: skipped in a row for skipped", "checkpoint", "skipped {skipped} steps", "skipped {state.scaler.in_a_row:.0f} steps", PRINTED)
mutant("print: four digits of the loss", "checkpoint", "loss {line['loss']:.6f}", "loss {line['loss']:.4f}", PRINTED)
mutant("print: evaluation with the count twice", "checkpoint", 'for name, value in metrics.items() if name != "count")',
       "for name, value in metrics.items())", f"{FIGURES}evaluation_is_printed_and_logged")
mutant("print: a resumed run names the epoch before", "checkpoint", 'f"at epoch {state.epoch + 1}, step', 'f"at epoch {state.epoch}, step',
       f"{FIGURES}resumed_run_says_where_it_goes_on")
mutant("print: a finished run goes on", "checkpoint", "if state.epoch < epochs else", "if state.epoch <= epochs else",
       f"{FIGURES}resumed_run_says_where_it_goes_on")
mutant("bar: starts at 0 after a resume", "checkpoint", "initial=self.state.step, ", "", BAR)
mutant("bar: names the epoch before", "checkpoint", 'f"epoch {self.state.epoch + 1}/{self.args.epochs}"',
       'f"epoch {self.state.epoch}/{self.args.epochs}"', BAR)
mutant("bar: does not move", "checkpoint", "            self.bar.update()\n", "            self.bar.update(0)\n", BAR)
mutant("bar: stays open", "checkpoint", "            self.bar = self.bar.close()\n", "            pass\n", BAR)
mutant("bar: position twice", "checkpoint", "text if self.bar is not None else position + text", "position + text", BAR)
mutant("tensorboard: counts are curves", "checkpoint", '"step", "global_step", "count"} if self.writer', '"step", "global_step"} if self.writer',
       SCALARS)
mutant("tensorboard: over the epoch", "checkpoint", "line[name], line[\"global_step\"])", 'line[name], line["epoch"])', SCALARS)
for mode in ("single", "dp", "ddp", "spawn"):
    mutant(f"{mode}: norm after clipping is logged", f"train_{mode}", "        run.end_step(grad_norm)\n",
           "        run.end_step(grad_norm.clamp(max=args.clip_grad_norm))\n",
           f"{FIGURES}every_mode_logs_the_norm_of_the_whole_gradient_before_clipping")
    mutant(f"{mode}: evaluated before it is saved", f"train_{mode}",
           '        run.save("last.pt")  # an interruption of the evaluation then loses nothing\n', "",
           f"{SAVES}training_is_saved_before_its_evaluation_and_the_epoch_after_it[{mode}-{1 if mode == 'single' else 2}]")

ORDERED = f"{SAVES}files_of_an_epoch_appear_whole_durable_and_in_this_order"
PREVIOUS = f"{SAVES}previous_checkpoint_is_moved_after_the_new_one_is_on_the_disk"
LOGGED = f"{SAVES}log_is_on_the_disk_before_a_checkpoint_is_begun"
TIES = f"{SAVES}the_first_of_equal_scores_stays_the_best"
ALL = 'self.save(*(["best.pt"] if best else []), *kept, "last.pt")'
WRITE = '        with keep_previous(self.folder / "last.pt"):\n            for name in names:\n'
mutant("save: last.pt before best.pt", "checkpoint", ALL, 'self.save("last.pt", *(["best.pt"] if best else []), *kept)', ORDERED)
mutant("save: last.pt before the kept one", "checkpoint", ALL, 'self.save(*(["best.pt"] if best else []), "last.pt", *kept)', ORDERED)
mutant("save: in the opposite order", "checkpoint", "            for name in names:\n", "            for name in names[::-1]:\n", ORDERED)
mutant("save: the log stays in memory", "checkpoint", "        os.fsync(self.file.fileno())  # a checkpoint must not be ahead of the log\n",
       "", LOGGED)
mutant("save: the log after the checkpoint", "checkpoint",
       "        os.fsync(self.file.fileno())  # a checkpoint must not be ahead of the log\n" + WRITE
       + "                save_checkpoint(checkpoint, self.folder / name)\n",
       WRITE + "                save_checkpoint(checkpoint, self.folder / name)\n        os.fsync(self.file.fileno())\n", LOGGED)
mutant("log: lines stay in Python's memory", "checkpoint", '        self.file.write(json.dumps(plain) + "\\n")\n        self.file.flush()\n',
       '        self.file.write(json.dumps(plain) + "\\n")\n', LOGGED)
mutant("save: only last.pt is durable", "checkpoint", "            os.fsync(file.fileno())  # the data",
       '            path.name != "last.pt" or os.fsync(file.fileno())  # the data', ORDERED)
mutant("save: only the name of last.pt is durable", "checkpoint", "    os.fsync(folder)  # and the name too",
       '    path.name != "last.pt" or os.fsync(folder)  # and the name too', ORDERED)
mutant("save: only the names of others are durable", "checkpoint", "    os.fsync(folder)  # and the name too",
       '    path.name == "last.pt" or os.fsync(folder)  # and the name too', ORDERED)
mutant("save: on the disk before it is written", "checkpoint", "            torch.save(checkpoint, file)\n            file.flush()\n"
       "            os.fsync(file.fileno())  # the data must be on the disk before the name points to it\n",
       "            os.fsync(file.fileno())\n            torch.save(checkpoint, file)\n            file.flush()\n", ORDERED)
mutant("save: another folder is made durable", "checkpoint", "folder = os.open(path.parent, os.O_RDONLY)",
       'folder = os.open(".", os.O_RDONLY)', ORDERED)
mutant("save: previous.pt before last.pt", "checkpoint", "        yield\n        if temporary.exists():\n            os.replace",
       "        if temporary.exists():\n            os.replace(temporary, path.with_name('previous.pt'))\n        yield\n"
       "        if temporary.exists():\n            os.replace", PREVIOUS)
mutant("save: previous.pt after the first file", "checkpoint", WRITE,
       '        for name in names:\n            with keep_previous(self.folder / "last.pt"):\n', PREVIOUS)
mutant("save: a leftover becomes previous.pt", "checkpoint",
       "    temporary.unlink(missing_ok=True)\n    try:\n        if path.exists():", "    try:\n        if path.exists():",
       f"{SAVES}leftover_of_a_killed_save_is_no_previous_checkpoint")
mutant("save: no previous.pt without hard links", "checkpoint", "                shutil.copyfile(path, temporary)\n", "                pass\n",
       f"{SAVES}file_system_without_hard_links_keeps_the_previous_one_too")
mutant("save: what failed stays", "checkpoint", "        if temporary.exists():\n            os.replace(temporary, path.with_name(\"previous.pt\"))\n"
       "    finally:\n        temporary.unlink(missing_ok=True)\n",
       "        if temporary.exists():\n            os.replace(temporary, path.with_name(\"previous.pt\"))\n    finally:\n        pass\n",
       f"{SAVES}failed_save_leaves_the_last_checkpoint_and_the_previous_one")
mutant("save: --keep-every one epoch late", "checkpoint", "state.epoch % self.args.keep_every == 0", "state.epoch % self.args.keep_every == 1",
       f"{SAVES}kept_epochs_are_every_so_many")
mutant("save: kept under the number of the epoch before", "checkpoint", 'f"epoch-{state.epoch:04}.pt"', 'f"epoch-{state.epoch - 1:04}.pt"',
       f"{SAVES}kept_epochs_are_every_so_many")
mutant("best: the last of equal scores", "checkpoint", "or score > state.best)\n", "or score >= state.best)\n", TIES)
mutant("best: infinity", "checkpoint", "math.isfinite(score) and (state", "not math.isnan(score) and (state", TIES)
mutant("best: zero is no score", "checkpoint", "(state.best is None or score", "(not state.best or score", TIES)
mutant("best: by the metric before the loss", "checkpoint", 'for name, value in metrics.items() if name != "loss")\n        self.log',
       "for name, value in metrics.items())\n        self.log", f"{SAVES}first_metric_that_is_no_loss_decides")
mutant("best: forgotten at resume", "checkpoint", 'for name in ("epoch", "step", "global_step", "best"):\n            setattr',
       'for name in ("epoch", "step", "global_step"):\n            setattr', f"{SAVES}tie_is_kept_across_a_resume")
mutant("best: a score that was not saved", "checkpoint", "state.best = earlier if self.refused else state.best", "pass",
       f"{SAVES}score_that_was_not_saved_is_not_the_best")
mutant("stop: not after an evaluation", "checkpoint", "if stop and state.epoch < self.args.epochs:", "if False:",
       f"{SAVES}stop_within_an_evaluation_comes_after_it")
EVALUATED = f"{SAVES}eval_only_names_the_epoch_whose_weights_it_sees"
mutant("eval-only: the epoch after", "checkpoint", "epoch = self.state.epoch - after_epoch", "epoch = self.state.epoch", EVALUATED)
mutant("eval-only: the epoch before the first", "checkpoint", "self.state.step == 0 < self.state.epoch", "self.state.step == 0", EVALUATED)
mutant("eval-only: the epoch before that of a step", "checkpoint", "self.state.step == 0 < self.state.epoch", "0 < self.state.epoch", EVALUATED)

DRIFTED = f"{DRIFT}drift_of_any_parameter_on_any_rank_is_named"
SUMMED = "for p in net.parameters()])\n    extremes"
mutant("drift: of the first parameter only", "common", SUMMED, "for p in list(net.parameters())[:1]])\n    extremes", DRIFTED)
mutant("drift: of all but the last parameter", "common", SUMMED, "for p in list(net.parameters())[:-1]])\n    extremes", DRIFTED)
mutant("drift: of what trains only", "common", SUMMED, "for p in net.parameters() if p.requires_grad])\n    extremes", DRIFTED)
mutant("drift: of weights in float32", "common", "p.detach().view(bits[p.element_size()])", "p.detach().float().view(torch.int32)", DRIFTED)
mutant("drift: of sums, not of bits", "common", "p.detach().view(bits[p.element_size()]).sum(dtype=torch.int64)", "p.detach().double().sum()",
       DRIFTED)
mutant("drift: the last names", "common", "', '.join(different[:5])}; does every", "', '.join(different[-5:])}; does every", DRIFTED)
mutant("drift: whole numbers of rank 0 stay there", "common", "    for buffer in net.buffers():\n        dist.broadcast",
       "    for buffer in filter(torch.is_floating_point, net.buffers()):\n        dist.broadcast", DRIFTED)
mutant("drift: buffers of rank 1", "common", "dist.broadcast(buffer, src=0)", "dist.broadcast(buffer, src=1)", DRIFTED)

MIDDLE = f"{PHOTO}evaluation_resizes_the_shorter_side_and_takes_the_middle"
RECIPE, SMALL = f"{PHOTO}crop_is_made_as_torchvision_makes_it", f"{PHOTO}small_images_fill_the_frame"
SHIFTED, KEYED_CROP = f"{PHOTO}small_images_are_shifted_by_an_eighth_and_half_of_them_mirrored", f"{PHOTO}crop_is_keyed_by_the_sample_the_epoch_and_the_seed"
SMALL_KEYED, FOLDERS = f"{PHOTO}small_image_files_are_keyed_by_the_sample", f"{PHOTO}folders_are_classes_and_val_goes_before_test"
CONSTANTS, NORMALISED = f"{PHOTO}constants_of_every_data_set", f"{PHOTO}network_sees_each_channel_normalised_in_its_precision"
DRAWS, ARRAYS = f"{PHOTO}draws_decide_the_window_and_the_mirroring", f"{PHOTO}arrays_are_augmented_in_training_only"
EVAL_SIZE = "v2.Resize(size * 8 // 7, antialias=True)"
mutant("photograph: resized to the crop", "task", EVAL_SIZE, "v2.Resize(size, antialias=True)", MIDDLE)
mutant("photograph: resized to the next number", "task", EVAL_SIZE, "v2.Resize(round(size * 8 / 7), antialias=True)", MIDDLE)
mutant("photograph: another margin", "task", EVAL_SIZE, "v2.Resize(size * 7 // 6, antialias=True)", MIDDLE)
mutant("photograph: squeezed", "task", EVAL_SIZE, "v2.Resize((size * 8 // 7, size * 8 // 7), antialias=True)", MIDDLE)
mutant("photograph: resized without antialiasing", "task", EVAL_SIZE, "v2.Resize(size * 8 // 7, antialias=False)", MIDDLE)
mutant("photograph: resized by the nearest pixel", "task", EVAL_SIZE, "v2.Resize(size * 8 // 7, interpolation=0)", MIDDLE)
mutant("photograph: evaluated anywhere", "task", "v2.CenterCrop(size)", "v2.RandomCrop(size)", MIDDLE)
mutant("photograph: evaluated mirrored", "task", "v2.CenterCrop(size)]", "v2.CenterCrop(size), v2.RandomHorizontalFlip(1.0)]", MIDDLE)
mutant("photograph: evaluated whole", "task", ", v2.CenterCrop(size)]", ", v2.Resize((size, size), antialias=True)]", MIDDLE)
CROP = "v2.RandomResizedCrop(size, antialias=True)"
mutant("photograph: crops of half of it at least", "task", CROP, "v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True)",
       f"{PHOTO}training_crops_are_of_any_size_and_shape_within_the_recipe")
mutant("photograph: square crops", "task", CROP, "v2.RandomResizedCrop(size, ratio=(1.0, 1.0), antialias=True)",
       f"{PHOTO}training_crops_are_of_any_size_and_shape_within_the_recipe")
mutant("photograph: cropped without antialiasing", "task", CROP, "v2.RandomResizedCrop(size, antialias=False)", RECIPE)
mutant("photograph: never mirrored", "task", ", v2.RandomHorizontalFlip()]", "]", f"{PHOTO}half_of_the_crops_are_mirrored")
mutant("photograph: always mirrored", "task", "v2.RandomHorizontalFlip()]", "v2.RandomHorizontalFlip(1.0)]",
       f"{PHOTO}half_of_the_crops_are_mirrored")
mutant("photograph: upside down", "task", "v2.RandomHorizontalFlip()]", "v2.RandomVerticalFlip()]", RECIPE)
FIT = "common.mix(self.seed, self.epoch, index))\n        return"
mutant("photograph: crop without the seed", "task", FIT, "common.mix(0, self.epoch, index))\n        return", KEYED_CROP)
mutant("photograph: crop without the epoch", "task", FIT, "common.mix(self.seed, 0, index))\n        return", KEYED_CROP)
mutant("photograph: crop without the sample", "task", FIT, "common.mix(self.seed, self.epoch, 0))\n        return", KEYED_CROP)
mutant("photograph: crop by what was drawn before", "task", "        torch.default_generator.manual_seed(common.mix(self.seed", "        (common.mix(self.seed",
       KEYED_CROP)
mutant("photograph: 64 pixels are small", "task", "training, size < 64,", "training, size <= 64,", MIDDLE)
mutant("photograph: 63 pixels are not small", "task", "training, size < 64,", "training, size < 63,",
       f"{PHOTO}image_of_the_right_size_is_not_touched")
mutant("small image: without antialiasing", "task", "v2.Resize(self.frame, antialias=True)", "v2.Resize(self.frame, antialias=False)", SMALL)
mutant("small image: cropped", "task", "v2.Resize(self.frame, antialias=True)",
       "v2.Compose([v2.Resize(size, antialias=True), v2.CenterCrop(size)])", SMALL)
mutant("small image: shifted by a quarter", "task", "self.frame[0] // 8)", "self.frame[0] // 4)", SHIFTED)
mutant("small image: shifted by a tenth", "task", "self.frame[0] // 8)", "self.frame[0] // 10)", SHIFTED)
mutant("small image: not mirrored", "task", "draws, flip=True)", "draws, flip=False)", SHIFTED)
mutant("small image: shifted in evaluation", "task", "if self.small and self.training:", "if self.small:", SMALL)
mutant("small image: by the place in the batch", "task", "np.asarray(indices), 3)\n            images", "np.arange(len(indices)), 3)\n            images",
       SMALL_KEYED)
mutant("small image: without the epoch", "task", "common.keyed_uniform(self.seed, self.epoch, np.asarray(indices), 3)\n            images",
       "common.keyed_uniform(self.seed, 0, np.asarray(indices), 3)\n            images", SMALL_KEYED)
mutant("small image: without the seed", "task", "common.keyed_uniform(self.seed, self.epoch, np.asarray(indices), 3)\n            images",
       "common.keyed_uniform(0, self.epoch, np.asarray(indices), 3)\n            images", SMALL_KEYED)
mutant("images: two of five are mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] < 0.4", DRAWS)
mutant("images: the other half is mirrored", "task", "draws[:, 2] < 0.5", "draws[:, 2] >= 0.5", DRAWS)
mutant("images: rows for columns", "task", "windows[index, :, rows, columns]", "windows[index, :, columns, rows]", DRAWS)
mutant("images: never shifted to the end", "task", "(draws[:, :2] * windows.shape[2])", "(draws[:, :2] * (windows.shape[2] - 1))", DRAWS)
mutant("images: upside down", "task", "images[mirrored, ..., ::-1]", "images[mirrored, ..., ::-1, :]", DRAWS)
mutant("folders: test before val", "task", '("val", "test") if (root', '("test", "val") if (root', FOLDERS)
mutant("folders: augmented in evaluation", "task", "training=not i, seed", "training=True, seed", FOLDERS)
mutant("folders: without the seed", "task", "training=not i, seed=args.seed", "training=not i, seed=0", FOLDERS)
mutant("folders: --image-size ignored", "task", 'args.image_size or DATASETS["imagefolder"][1]', 'DATASETS["imagefolder"][1]', FOLDERS)
mutant("folders: one class more", "task", "sum(folder.is_dir() for", "1 + sum(folder.is_dir() for", FOLDERS)
mutant("arrays: fashion is never mirrored", "task", 'flip = args.dataset != "mnist"', 'flip = args.dataset not in ("mnist", "fashion-mnist")',
       ARRAYS)
mutant("arrays: digits are mirrored", "task", 'flip = args.dataset != "mnist"', "flip = True", ARRAYS)
mutant("arrays: shifted by a quarter", "task", '"shift": images.shape[-1] // 8', '"shift": images.shape[-1] // 4', ARRAYS)
mutant("arrays: turned", "task", "images.permute(0, 3, 1, 2)", "images.permute(0, 3, 2, 1)", ARRAYS)
mutant("arrays: augmented in evaluation", "task", '"seed": args.seed} if train else {}', '"seed": args.seed}', ARRAYS)
mutant("synthetic: --image-size ignored", "task", "args.image_size or size, args.image_size or size)", "size, size)",
       f"{PHOTO}synthetic_images_cost_nothing_and_have_the_size_that_was_asked_for")
mutant("normalise: blue for red", "task", "(123.7, 116.3, 103.5), (58.4, 57.1, 57.4)", "(103.5, 116.3, 123.7), (57.4, 57.1, 58.4)", CONSTANTS)
mutant("normalise: spread of another set", "task", "(63.0, 62.1, 66.7)", "(68.2, 65.4, 70.4)", CONSTANTS)
mutant("normalise: mean of another set", "task", "(33.3,), (78.6,)", "(72.9,), (78.6,)", CONSTANTS)
mutant("normalise: another mean of the digits", "task", "(73.3,), (90.2,)", "(78.3,), (90.2,)", CONSTANTS)
mutant("normalise: divided first", "task", "return ((images.to(dtype) - shift) / scale,)", "return (images.to(dtype) / scale - shift,)", NORMALISED)
mutant("normalise: not divided", "task", "return ((images.to(dtype) - shift) / scale,)", "return (images.to(dtype) - shift,)", NORMALISED)
mutant("normalise: the first channel's for all", "task", "torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)",
       "torch.tensor(values[:1], device=device, dtype=dtype).view(-1, 1, 1)", NORMALISED)
mutant("normalise: constants in float32", "task", "torch.tensor(values, device=device, dtype=dtype).view(-1, 1, 1)",
       "torch.tensor(values, device=device).view(-1, 1, 1)", NORMALISED)
mutant("normalise: in float32", "task", 'std=std, dtype=getattr(torch, args.dtype)))\n    return model', "std=std, dtype=torch.float32))\n    return model",
       NORMALISED)
mutant("resnet9: logits twice as large", "task", "self.head(features) * 0.125", "self.head(features) * 0.25",
       f"{PHOTO}logits_of_resnet9_are_an_eighth_of_its_head")

HALVES = "sync_batchnorm::test_half_precision_is_normalised_by_statistics_in_float32"
mutant("sync-bn: statistics in half precision", "replicas", "value.to(torch.promote_types(value.dtype, torch.float32))", "value", HALVES)
mutant("sync-bn: float32 out of half precision", "replicas", "if self.affine else normalised).to(given)", "if self.affine else normalised)", HALVES)
mutant("sync-bn: squares in half precision", "replicas", "centred.square().sum(dims)", "centred.to(given).square().float().sum(dims)", HALVES)
mutant("sync-bn: normalised in half precision", "replicas", "normalised = centred *", "normalised = centred.to(given) *", HALVES)
mutant("sync-bn: count in half precision", "replicas", "value.numel() / value.shape[1], dtype=value.dtype)",
       "value.numel() / value.shape[1], dtype=given).to(value.dtype)", HALVES)
mutant("sync-bn: mean in half precision", "replicas", "mean, n = total[:-1] / total[-1],", "mean, n = (total[:-1] / total[-1]).to(given).to(value.dtype),",
       HALVES)
mutant("sync-bn: statistics of a layer in half precision", "replicas", "self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)",
       "self.running_mean.lerp_(mean, factor)", HALVES)

WINS, WINNER = f"{TWO}stronger_signal_wins_whichever_comes_first", f"{TWO}stronger_signal_wins_on_whichever_rank"
REMEMBER = "self.received = max(self.received, list(SIGNALS).index(number) + 1)"
mutant("signals: the last one wins", "checkpoint", REMEMBER, "self.received = list(SIGNALS).index(number) + 1", WINS)
mutant("signals: the first one wins", "checkpoint", REMEMBER, "self.received = self.received or list(SIGNALS).index(number) + 1", WINS)
mutant("signals: the weaker one wins", "checkpoint", REMEMBER,
       "self.received = min(self.received or 9, list(SIGNALS).index(number) + 1)", WINS)
mutant("signals: Ctrl-C is stronger than the system", "options", "signal.SIGINT: 130, signal.SIGTERM: 143}", "signal.SIGTERM: 143, signal.SIGINT: 130}",
       WINS)
mutant("signals: SLURM's warning is the strongest", "options", "{signal.SIGUSR1: 0, signal.SIGINT: 130, signal.SIGTERM: 143}",
       "{signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 0}", WINS)
mutant("signals: the weaker one of the ranks wins", "checkpoint", "return list(SIGNALS)[flag - 1]", "return list(SIGNALS)[-flag]", WINNER)
mutant("signals: ranks wait in every step", "checkpoint", "agreed = self.pending if wait else earlier", "agreed = self.pending", WINNER)
mutant("stop: names another signal", "checkpoint", 'f"stopped by {number.name} {step}"', 'f"stopped by {list(SIGNALS)[0].name} {step}"',
       f"{TWO}stop_says_what_it_saved_and_ends_with_its_code")
mutant("stop: what was not saved was saved", "checkpoint", "saved = not broadcast_object(self.refused)", "saved = True",
       f"{TWO}stop_that_could_not_be_saved_says_so")

ROW, PROCESSES, TURN = f"{SUMS}row_of_one_device", f"{SUMS}row_of_several_processes", f"{SUMS}turns_time_only_the_steps_that_count"
TABLE, START = f"{SUMS}table_shows_each_row_and_its_share_of_one_device", f"{SUMS}start_up_is_the_median_of_turns"
mutant("bench: the mean turn", "bench", "{name: median(times) for name, times in row", "{name: mean(times) for name, times in row", ROW)
mutant("bench: the fastest turn", "bench", "{name: median(times) for name, times in row", "{name: min(times) for name, times in row", ROW)
mutant("bench: ratios upside down", "bench", "ratios = [bare / script for", "ratios = [script / bare for", ROW)
mutant("bench: ratio of the medians", "bench", '{"ratio": median(ratios),', '{"ratio": middle["bare"] / middle["script"],', ROW)
mutant("bench: range upside down", "bench", '"ratio_min": min(ratios), "ratio_max": max(ratios)', '"ratio_min": max(ratios), "ratio_max": min(ratios)',
       ROW)
mutant("bench: the smallest process", "bench", 'max(r["peak_mib"] for r in ranks)', 'min(r["peak_mib"] for r in ranks)', PROCESSES)
mutant("bench: bytes of rank 0", "bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'ranks[0]["bytes_sent"]', PROCESSES)
mutant("bench: bytes of all ranks", "bench", 'mean(rank["bytes_sent"] for rank in ranks)', 'sum(rank["bytes_sent"] for rank in ranks)', PROCESSES)
mutant("bench: replicas send", "bench", 'ring_bytes(row["gradient_bytes"], n)', 'ring_bytes(row["gradient_bytes"], devices)', f"{SUMS}row_of_replicas")
mutant("bench: latency in ms", "bench", "args.latency * 1e-6", "args.latency * 1e-3", ROW)
mutant("bench: bandwidth in bits", "bench", "args.bandwidth * 1e9", "args.bandwidth * 1e9 / 8", ROW)
mutant("bench: efficiency of the script", "bench", 'predict(middle["bare"], row["gradient_bytes"], many', 'predict(middle["script"], row["gradient_bytes"], many',
       ROW)
mutant("bench: latency is in the bandwidth", "bench", 'middle["many"] - middle["few"]', 'middle["many"]', PROCESSES)
mutant("bench: latency of one message too many", "bench", 'middle["few"] / (2 * n - 2)', 'middle["few"] / (2 * n)', PROCESSES)
mutant("bench: predicted from the step with its all-reduce", "bench", 'predict(middle["alone"]', 'predict(middle["bare"]', PROCESSES)
mutant("bench: predicted by the tree", "bench", '**link)["ring"]', '**link)["tree"]', PROCESSES)
mutant("bench: the script's step is the measured one", "bench", '"measured": middle["bare"]', '"measured": middle["script"]', PROCESSES)
mutant("bench: each process has all cores", "bench", "str(max(1, CORES // n))", "str(CORES)", PROCESSES)
mutant("bench: the turn that warms up counts", "bench", "* (turn > 0)", "* (turn >= 0)", TURN)
mutant("bench: settling counts", "bench", "if i == SETTLE:", "if i == 0:", TURN)
mutant("bench: seconds of a window", "bench", "return (time.perf_counter() - start) / steps", "return time.perf_counter() - start", TURN)
mutant("bench: settling steps in the mean", "bench", "return (time.perf_counter() - start) / steps",
       "return (time.perf_counter() - start) / (SETTLE + steps)", TURN)
mutant("bench: bytes of the timed steps only", "bench", '(bytes_sent() - before) / (SETTLE + steps) if', "(bytes_sent() - before) / steps if", TURN)
mutant("bench: gradient of frozen parameters", "bench", "for p in run.state.net.parameters() if p.requires_grad)", "for p in run.state.net.parameters())",
       TURN)
mutant("bench: bare loop sums its losses", "bench", "/ args.batch_size\n    model", "/ 1\n    model",
       f"{SUMS}bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: bare loop trains the script's network", "bench", "copy.deepcopy(run.state.net)", "run.state.net",
       f"{SUMS}bare_loop_makes_the_step_of_the_script[single]")
mutant("bench: one device is N", "bench", '/ (1 if args.kind == "cpu" else row["devices"])', '/ (1 if args.kind == "cpu" else 1)',
       f"{SUMS}accelerators_share_nothing")
mutant("bench: cores are devices", "bench", '/ (1 if args.kind == "cpu" else row["devices"])', '/ row["devices"]', TABLE)
mutant("bench: scaled by the bare loop", "bench", 'row["script"] / reference', 'row["bare"] / reference', TABLE)
mutant("bench: start-up once", "bench", "min(3, args.repeats)", "min(1, args.repeats)", TABLE)
mutant("bench: the fastest start-up", "bench", "return {name: median(times) for name, times in seconds", "return {name: min(times) for name, times in seconds",
       START)
mutant("bench: start-up until the first line", "bench", 'if not any("step 1/" in line', 'if not any("" in line', START)
mutant("bench: start-up in the ranks' world", "bench", 'if name not in own}, "PATH"', '}, "PATH"', START)
mutant("bench: MiB for MB", "bench", 'row["bytes_formula"] / 1e6,', 'row["bytes_formula"] / 2**20,', TABLE)
mutant("bench: columns swapped", "bench", 'f"{row[\'bare\']:.0f}", f"{row[\'script\']:.0f}"]', 'f"{row[\'script\']:.0f}", f"{row[\'bare\']:.0f}"]', TABLE)
mutant("bench: exit code of a failed worker", "bench", 'getattr(error, "exit_code", 1)', "1",
       f"{SUMS}failing_worker_is_told_by_the_last_line_of_its_log")

# ------------------------------------------------------------------------------ defaults, constants, messages

mutant("warm-up: cut down", "common",
       "round(args.warmup_epochs * steps_per_epoch)",
       "int(args.warmup_epochs * steps_per_epoch)",
       "training_math::test_warmup_is_rounded_to_the_nearest_step")
mutant("cosine: rises again after the end", "common",
       "min(1.0, (step - warmup) / max(1, last - warmup))",
       "(step - warmup) / max(1, last - warmup)",
       "training_math::test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("cosine: nothing but warm-up divides by zero", "common",
       "(step - warmup) / max(1, last - warmup)",
       "(step - warmup) / (last - warmup)",
       "training_math::test_cosine_stays_at_zero_after_its_end_and_a_run_may_be_all_warmup")
mutant("scaler: another first scale", "common",
       "2.0**16",
       "2.0**10",
       "training_math::test_scaler_skips_and_counts_non_finite_gradients_at_every_precision", "training_math::test_scaler_returns_the_norm_of_the_true_gradient")
mutant("powersgd: another rank", "common",
       "matrix_approximation_rank=4",
       "matrix_approximation_rank=1",
       "defaults::test_settings_of_powersgd")
mutant("powersgd: compresses from the first step", "common",
       "start_powerSGD_iter=10",
       "start_powerSGD_iter=2",
       "defaults::test_settings_of_powersgd")
mutant("channels last: ignored", "common",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.contiguous_format",
       "training_math::test_filters_are_stored_as_asked")
mutant("channels last: always", "common",
       "torch.channels_last if args.channels_last else torch.contiguous_format",
       "torch.channels_last",
       "training_math::test_filters_are_stored_as_asked")
mutant("freeze: all may be frozen", "common",
       "if frozen == len(parameters):",
       "if False:",
       "cli::test_bad_input_is_refused_by_name")
mutant("freeze: says how many are left", "common",
       'print0(f"frozen: {frozen} of',
       'print0(f"frozen: {len(list(net.parameters())) - frozen} of',
       "defaults::test_build_says_how_many_tensors_are_frozen")
mutant("weights: number of the file's tensors", "common",
       'print0(f"weights: {len(fitting)} of',
       'print0(f"weights: {len(given)} of',
       "data_and_models::test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("weights: extra ones not named", "common",
       "if extra := [name for name in given if name not in own]:",
       "if extra := []:",
       "data_and_models::test_weights_of_another_network_are_loaded_as_far_as_they_fit_and_the_rest_is_named")
mutant("meter: sums of another world to rank 1", "common",
       "sum(of) * (rank == 0)",
       "sum(of) * (rank == world_size - 1 > 0)",
       "training_math::test_sums_of_ranks_go_back_to_the_ranks", "training_math::test_meter_goes_on_from_its_sums")
mutant("seed_rng: numpy draws on", "loading",
       "    random.seed(bits)\n    np.random.seed(bits % 2**32)\n",
       "    random.seed(bits)\n",
       "odd_tasks::test_seeds_of_an_evaluation_are_no_seeds_of_training", "odd_tasks::test_evaluation_repeats_what_it_draws")
mutant("evaluation: seed of the first step", "loading",
       "seed_rng(seed, -1, i",
       "seed_rng(seed, 0, i",
       "odd_tasks::test_seeds_of_an_evaluation_are_no_seeds_of_training", "odd_tasks::test_evaluation_repeats_what_it_draws")
mutant("evaluation: larger batches", "loading",
       "min(batch_size, math.ceil(length / 8))",
       "min(batch_size, math.ceil(length / 4))",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: a quarter in a batch", "loading",
       "math.ceil(length / 8)",
       "math.ceil(length / 4)",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("evaluation: an eighth, rounded down", "loading",
       "math.ceil(length / 8)",
       "max(1, length // 8)",
       "sampling::test_evaluation_batches_occupy_eight_ranks")
mutant("loader: sixteen workers", "loading",
       "min(8, torch.get_num_threads())",
       "min(16, torch.get_num_threads())",
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: one worker", "loading",
       "min(8, torch.get_num_threads())",
       "1",
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("loader: what fits the pipe", "loading",
       "FITS_THE_PIPE = 2**14",
       "FITS_THE_PIPE = 2**17",
       "data_and_models::test_small_tensors_of_a_worker_come_by_value")
mutant("loader: nothing is pinned", "loading",
       "pin_memory=pin,",
       "pin_memory=False,",
       "sampling::test_loader_has_a_worker_for_each_core_and_pins")
mutant("data: --skip-corrupt stops at the last", "loading",
       "(*range(first, len(self.dataset)), *range(first))",
       "range(first, len(self.dataset))",
       "endings::test_broken_sample_is_named_or_replaced_alike_everywhere")
mutant("tensorboard: resumed without purging", "checkpoint",
       'purge_step=checkpoint["global_step"] + 1 if checkpoint else None',
       "purge_step=None",
       "log_figures::test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("tensorboard: purges its last step", "checkpoint",
       'purge_step=checkpoint["global_step"] + 1 if',
       'purge_step=checkpoint["global_step"] if',
       "log_figures::test_tensorboard_goes_on_after_the_step_of_the_checkpoint")
mutant("tensorboard: 32 images", "checkpoint",
       "tensor[:16]",
       "tensor[:32]",
       "log_figures::test_tensorboard_is_shown_the_first_sixteen_and_what_they_are_taken_for")
mutant("tensorboard: worst guesses", "checkpoint",
       "outputs.argmax(1).tolist()",
       "outputs.argmin(1).tolist()",
       "log_figures::test_tensorboard_is_shown_the_first_sixteen_and_what_they_are_taken_for")
mutant("log: the line of the checkpoint's own step is cut off", "checkpoint",
       'step <= checkpoint["global_step"]',
       'step < checkpoint["global_step"]',
       "checkpoint::test_log_is_cut_back_to_the_checkpoint_even_if_its_last_line_is_torn")
mutant("log: a torn last line is kept", "checkpoint",
       'if not done or not line.endswith("\\n"):',
       "if not done:",
       "log_figures::test_log_stays_whole_lines_after_a_resume")
mutant("log: length in characters", "checkpoint",
       "kept += len(line.encode())",
       "kept += len(line)",
       "log_figures::test_log_stays_whole_lines_after_a_resume")
mutant("save: the last names of what is not finite", "checkpoint",
       "non_finite(checkpoint, self.state.by_design)[:5]",
       "non_finite(checkpoint, self.state.by_design)[-5:]",
       "defaults::test_five_names_are_enough")
mutant("resume: fused of the other device", "checkpoint",
       'group["fused"] = now["fused"]',
       "pass",
       "defaults::test_optimizer_of_an_accelerator_goes_on_here")
mutant("nodes: port 29501", "options",
       "nodes.master_port or 29500",
       "nodes.master_port or 29501",
       "defaults::test_port_of_several_nodes")
mutant("slurm: one port for all jobs", "options",
       '20_000 + int(slurm["JOB_ID"]) % 10_000',
       "20_000",
       "pitfalls_29_42::test_pitfall_40_ranks_from_slurm", "pitfalls_29_42::test_pitfall_40_address_from_slurm")
mutant("task: its folder goes first", "options",
       "sys.path.append(folder)",
       "sys.path.insert(0, folder)",
       "defaults::test_neighbours_of_a_task_replace_nothing")
mutant("check: one sample", "options",
       "n = min(2, len(dataset))",
       "n = 1",
       "cli::test_bad_input_is_refused_by_name")
mutant("check: a metric named count", "options",
       'RESERVED = {"loss", "count", "event", "epoch", "global_step"}',
       'RESERVED = {"loss", "event", "epoch", "global_step"}',
       "defaults::test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a metric named loss", "options",
       'RESERVED = {"loss", "count", "event", "epoch", "global_step"}',
       'RESERVED = {"count", "event", "epoch", "global_step"}',
       "defaults::test_names_that_the_log_uses_itself_are_no_metrics")
mutant("check: a read-only folder", "options",
       "os.access(folder, os.W_OK | os.X_OK)",
       "True",
       "cli::test_bad_input_is_refused_by_name")
mutant("options: metrics without their options", "options",
       "    for name in names[2:]:\n",
       "    for name in names[2:3]:\n",
       "defaults::test_options_of_a_loss_and_of_a_metric_are_filled_in")
mutant("launch: no restarts on one machine", "launch",
       '"--max-restarts", "3"]\n        start',
       '"--max-restarts", "0"]\n        start',
       "defaults::test_what_torchrun_is_told")
mutant("launch: --timeout cut down", "launch",
       "timeout={math.ceil(timeout)}",
       "timeout={int(timeout) - 1}",
       "defaults::test_what_torchrun_is_told")
mutant("launch: the last failure is the cause", "launch",
       "_line(causes[0])",
       "_line(causes[-1])",
       "defaults::test_earliest_failure_is_the_cause")
mutant("plot: counts are drawn", "plot",
       'COUNTS = {"event", "epoch", "step", "global_step", "count"}',
       'COUNTS = {"event", "epoch", "step", "global_step"}',
       "plot::test_axes_panels_and_lines")
mutant("plot: four columns", "plot",
       "columns = min(3, len(panels))",
       "columns = min(4, len(panels))",
       "plot::test_axes_panels_and_lines")
mutant("plot: all lines of one width", "plot",
       "width = 1 + 5 *",
       "width = 1 + 0 *",
       "plot::test_axes_panels_and_lines")
mutant("plot: a single point is not seen", "plot",
       'marker="." if len(points) < 3 else ""',
       'marker=""',
       "plot::test_axes_panels_and_lines")
mutant("plot: events mixed", "plot",
       'if line["event"] == event and line.get(name) is not None]',
       "if line.get(name) is not None]",
       "plot::test_axes_panels_and_lines")
mutant("plot: empty panels stay", "plot",
       "        axis.remove()\n",
       "        pass\n",
       "plot::test_axes_panels_and_lines")
mutant("plot: any suffix", "plot",
       'args.output.suffix not in (".svg", ".png", ".pdf") or',
       "",
       "plot::test_picture_that_cannot_be_written_is_refused")
mutant("sync-bn: converted on accelerators too", "replicas",
       'if device.type != "cpu":\n        return nn.Sync',
       "if False:\n        return nn.Sync",
       "sync_batchnorm::test_accelerators_have_torchs_own")
mutant("task: top-3 as top5", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(min(3, outputs.shape[1]), dim=1)",
       "survivors::test_metrics_of_the_default_task")
mutant("task: fewer than five classes", "task",
       "outputs.topk(min(5, outputs.shape[1]), dim=1)",
       "outputs.topk(5, dim=1)",
       "photographs::test_fewer_than_five_classes_are_all_among_the_best_five")
mutant("task: note for photographs too", "task",
       "(args.image_size or size) < 64",
       "(args.image_size or size) < 640",
       "data_and_models::test_small_images_are_told_of_a_coarse_stem")
mutant("task: googlenet with two outputs", "task",
       '"aux_logits": False,',
       '"aux_logits": True,',
       "photographs::test_models_of_torchvision_have_one_output_and_the_classes_of_the_data")
mutant("task: digits not stretched", "task",
       ".unsqueeze(1) * 15",
       ".unsqueeze(1) * 16",
       "photographs::test_constants_of_every_data_set", "survivors::test_default_task_augments_by_the_seed_and_only_in_training")
mutant("task: digits not shifted", "task",
       "shift=1, seed=args.seed",
       "shift=0, seed=args.seed",
       "photographs::test_digits_are_shifted_by_one_pixel_in_training")
mutant("plot: loss on a linear axis", "plot", '"log" if name in LOGARITHMIC and positive else "linear"', '"linear"',
       "plot::test_axes_panels_and_lines")
mutant("default: --epochs", "options",
       '"--epochs", type=positive, default=30',
       '"--epochs", type=positive, default=20',
       "defaults::test_defaults")
mutant("default: --batch-size", "options",
       '"--batch-size", type=positive, default=64',
       '"--batch-size", type=positive, default=32',
       "defaults::test_defaults")
mutant("default: --lr", "options",
       '"--lr", type=number(float, 0), default=0.1',
       '"--lr", type=number(float, 0), default=0.01',
       "defaults::test_defaults")
mutant("default: --momentum", "options",
       "type=fraction, default=0.9",
       "type=fraction, default=0.95",
       "defaults::test_defaults")
mutant("default: --weight-decay", "options",
       'default=1e-3, metavar="X", help="on every',
       'default=1e-4, metavar="X", help="on every',
       "defaults::test_defaults")
mutant("default: --log-every", "options",
       'default=50, metavar="STEPS"',
       'default=10, metavar="STEPS"',
       "defaults::test_defaults")
mutant("default: --timeout", "options",
       'default=600, metavar="SECONDS"',
       'default=1800, metavar="SECONDS"',
       "defaults::test_defaults")
mutant("default: --schedule", "options",
       '"cyclic"], default="cosine"',
       '"cyclic"], default="constant"',
       "defaults::test_defaults")
mutant("default: --label-smoothing", "options",
       'type=fraction, default=0.1, metavar="X", help="probability',
       'type=fraction, default=0.0, metavar="X", help="probability',
       "defaults::test_defaults")
mutant("range: --seed", "options",
       "number(int, 0, 2**63 - 1)",
       "number(int, 0, 2**63)",
       "defaults::test_ranges[seed]")
mutant("range: --image-size", "options",
       "number(int, 8)",
       "number(int, 1)",
       "defaults::test_ranges[image-size]")
mutant("range: ends are left out", "options",
       "if not low <= value <= high",
       "if not low < value <= high",
       "defaults::test_ranges")
mutant("range: the last is left out", "options",
       "if not low <= value <= high",
       "if not low <= value < high",
       "defaults::test_ranges")
mutant("resume: --deterministic is another run", "checkpoint",
       'HARMLESS |= {"channels_last", "deterministic",',
       'HARMLESS |= {"channels_last",',
       "defaults::test_what_may_change_at_resume[deterministic]")
mutant("resume: --tensorboard is another run", "checkpoint",
       'HARMLESS |= {"tensorboard", "device",',
       'HARMLESS |= {"device",',
       "defaults::test_what_may_change_at_resume[tensorboard]")
mutant("resume: --amp is harmless", "checkpoint",
       'HARMLESS |= {"tensorboard", "device",',
       'HARMLESS |= {"amp", "tensorboard", "device",',
       "defaults::test_what_may_change_at_resume[amp]")
mutant("resume: --grad-compress is harmless", "checkpoint",
       'HARMLESS |= {"tensorboard", "device",',
       'HARMLESS |= {"grad_compress", "tensorboard", "device",',
       "defaults::test_what_may_change_at_resume[grad_compress]")
mutant("eval-only: in another precision", "checkpoint",
       '"task", "dtype", "average",',
       '"task", "average",',
       "defaults::test_what_may_change_at_resume[dtype]")
mutant("eval-only: with another smoothing", "checkpoint",
       ', "freeze", "label_smoothing"}',
       ', "freeze"}',
       "defaults::test_what_may_change_at_resume[label_smoothing]")
mutant("nodes: workers are compared", "checkpoint",
       '"task", "workers", "device", "local_rank", "node_rank", "dist_url"}',
       '"task", "device", "local_rank", "node_rank", "dist_url"}',
       "defaults::test_what_may_differ_between_nodes")
mutant("load: samples not looked at", "checkpoint",
       '"global_step", "samples"), int)',
       '"global_step"), int)',
       "defaults::test_checkpoint_lacks_nothing")
mutant("load: log not looked at", "checkpoint",
       '"average", "log", "config"), dict)',
       '"average", "config"), dict)',
       "defaults::test_checkpoint_lacks_nothing")
mutant("load: best of any kind", "checkpoint",
       '"best": (float, type(None))}',
       '"best": object}',
       "defaults::test_checkpoint_lacks_nothing")
mutant("folder: without the process", "checkpoint",
       "{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}",
       "{time.strftime('%Y%m%d-%H%M%S')}",
       "defaults::test_folder_of_a_run_without_a_name")
mutant("folder: without the model", "checkpoint",
       'f"runs/{args.dataset}-{args.model}-{unique}"',
       'f"runs/{args.dataset}-{unique}"',
       "defaults::test_folder_of_a_run_without_a_name")

mutant("drift: the smallest number has no negative", "common", "torch.cat([sums, ~sums])", "torch.cat([sums, 1 - sums])", DRIFTED)
mutant("drift: minus zero is overlooked", "common", "torch.cat([sums, ~sums])  # ~ and not -, which would overflow at the smallest number\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the largest, and in reverse order the smallest\n    largest, smallest = extremes[: len(sums)].tolist(), (~extremes[len(sums) :]).tolist()",
       "torch.cat([sums, -sums])\n    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)\n    largest, smallest = extremes[: len(sums)].tolist(), (-extremes[len(sums) :]).tolist()", DRIFTED)

# fmt: on

# -------------------------------------------------------------------------------------------------------------------- the program


def copy_project(source: Path, folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache", "shared")
    return Path(shutil.copytree(source, folder / "project", ignore=ignored))


def serve() -> None:
    """Start the server from which each run of the tests is forked: importing torch takes longer than most of the tests."""
    os.environ.update(OMP_NUM_THREADS="1", TESTS_FORK="1")
    context.set_forkserver_preload(SLOW)
    multiprocessing.forkserver.ensure_running()


def be_pytest(project: Path, arguments: list[str]) -> None:
    """Run pytest in this process, a fork of the server, as if it had been started in the project."""
    os.setsid()
    os.chdir(project)
    output = os.open(project.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(project.parent / "tmp"))
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:] = [str(project), *(path for path in sys.path if path and not Path(path).is_relative_to(ROOT))]
    for name in ("mutants", "__mp_main__"):  # of this program; the project has its own
        sys.modules.pop(name, None)
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_tests(project: Path, selection: Iterable[str], timeout: float) -> tuple[int | None, str]:
    """Run tests in a copy of the project; return pytest's exit code, None for a time-out, and its output. Nothing outlives the call."""
    (project.parent / "tmp").mkdir(exist_ok=True)
    options = ["-x", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={project.parent / 'basetemp'}"]
    options += ["-m", "", "-s"]  # the long tests too; and no capture, which forks of pytest would write into
    with one_thread:
        process = context.Process(target=be_pytest, args=(project, [*options, *selection]))
        process.start()
    multiprocessing.connection.wait([process.sentinel], timeout)
    with one_thread:
        code = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what tests left behind, or all of them
        process.join()
    return code, (project.parent / "output").read_text(errors="replace")


class Outcome(NamedTuple):
    mutant: Mutant
    killer: str  # the test that failed first; empty for a survivor
    seconds: float
    remark: str = ""


def try_mutant(source: Path, mutant: Mutant) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        project = copy_project(source, Path(name))
        (project / mutant.file).write_text(mutant.apply(project))
        code, output = run_tests(project, mutant.selection(), TIMEOUT)
    seconds = time.monotonic() - started
    failed = re.search(r"^FAILED tests/(\S+?\.py::\w+(?:\[[^\]]*\])?)", output, re.MULTILINE)
    if code == 1 and failed:
        return Outcome(mutant, failed[1], seconds)
    reasons = {0: "all selected tests pass", None: f"no end within {TIMEOUT} s", 1: "an error outside a test"}
    return Outcome(mutant, "", seconds, f"{reasons.get(code, f'pytest ended with {code}')}\n{output[-1500:]}")


def check_baseline(source: Path, selection: list[str]) -> None:
    """All tests must pass without a fault, or a failure would say nothing."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        halves = [sorted(selection)[i::SIDE_BY_SIDE] for i in range(SIDE_BY_SIDE)]
        projects = [copy_project(source, Path(tempfile.mkdtemp(dir=name))) for _ in halves]
        for code, output in pool.map(lambda project, half: run_tests(project, half, 900) if half else (0, ""), projects, halves):
            if code != 0:
                sys.exit(f"the tests fail without a fault, so that they cannot tell:\n{output[-3000:]}")


def table(outcomes: list[Outcome]) -> str:
    rows = [["mutant", "file", "killed by", "seconds"]]
    rows += [[o.mutant.name, o.mutant.file, o.killer.replace("|", r"\|") or "**nothing**", f"{o.seconds:.0f}"] for o in outcomes]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    rows.insert(1, [*("-" * width for width in widths[:3]), "-" * (widths[3] - 1) + ":"])
    return "\n".join("| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="SUBSTRING", default="", help="try the mutants whose name or file it is part of")
    parser.add_argument("--markdown", action="store_true", help="print the table alone, when all is done")
    parser.add_argument("--list", action="store_true", help="print the mutants and the tests that should notice them; run nothing")
    args = parser.parse_args(argv)
    chosen = [mutant for mutant in MUTANTS if args.only in f"{mutant.name} {mutant.file}"]
    if not chosen:
        parser.error(f"--only {args.only}: no mutant has such a name")
    for mutant in chosen:
        mutant.apply(ROOT)
    if args.list:
        print("\n".join(f"{mutant.name} ({mutant.file}): {', '.join(mutant.tests)}" for mutant in chosen))
        return 0
    started = time.monotonic()
    outcomes = []
    serve()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        source = copy_project(ROOT, Path(name))  # what is edited meanwhile does not count
        check_baseline(source, list(dict.fromkeys(test for mutant in chosen for test in mutant.selection())))
        for outcome in pool.map(functools.partial(try_mutant, source), chosen):
            outcomes.append(outcome)
            if not args.markdown:
                verdict = outcome.killer or f"SURVIVED: {outcome.remark}"
                print(f"{outcome.seconds:4.0f} s  {outcome.mutant.name}: {verdict}", flush=True)
    survivors = [outcome for outcome in outcomes if not outcome.killer]
    print(table(outcomes))
    print(f"\n{len(outcomes)} mutants, {len(outcomes) - len(survivors)} killed, {time.monotonic() - started:.0f} seconds.")
    for outcome in survivors:
        print(f"SURVIVED {outcome.mutant.name}: {outcome.remark.splitlines()[0]}", file=sys.stderr)
    return int(bool(survivors))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
