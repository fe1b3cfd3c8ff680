"""Watch a training program from within.

The tool puts this directory on PYTHONPATH and names a directory in SAMERUN_DIR. torch calls
`install` at the end of its import: samerun_observer-1.dist-info says that it is an extension of
torch. Each process that trains writes what it saw to SAMERUN_DIR/PID.pkl, and ends where the step
after the last one to be seen begins. SAMERUN_DIR/plan.json says how many steps, and what to make
even (samerun_even.py). The observer draws no random number and calls no collective: it changes no
bit of a run. What fails in watching is not seen, and breaks no program (`attempt`).
"""

import functools
import json
import math
import os
import pickle
import time
import weakref
from collections import Counter, deque
from dataclasses import is_dataclass

import samerun_even
import torch
import torch.distributed
from torch.optim import optimizer, swa_utils
from torch.utils.data import DataLoader, dataloader, get_worker_info

SMALL, WIDTH = 1024, 256  # of a tensor with more than SMALL numbers, WIDTH signed sums are kept
ROWS = 2**14  # of WIDTH numbers, that are summed at once
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
WRAPPERS |= {"_FabricModule", "LightningModule"}  # modules that call the network
MOST_STEPS, MOST_SECONDS = 60, 60  # if --steps is not given
NOT_SETTINGS = {"params", "param_names", "initial_lr", "foreach", "fused"}
STOPPED = 130  # the exit code of a process that ends here: no success, so `train && upload` stops


class Watcher:
    def __init__(self):
        """Begin anew: at the start, and in a forked process."""
        self.folder = os.environ["SAMERUN_DIR"]
        with open(f"{self.folder}/plan.json") as file:
            plan = json.load(file)  # {"steps": N, "shake": true, "even": [...]}
        self.steps, self.shake, self.even = plan["steps"], plan["shake"], plan["even"]
        self.file, self.rank, self.world = None, 0, 1
        self.number = None  # of this step; earlier processes of this rank may have made some
        self.start, self.second_epoch, self.mark = time.monotonic(), None, None
        self.modules = {}  # id: (module, its parameters), of those called from outside
        self.networks, self.shapes = [], []  # ids of those that were trained, and their shapes
        self.copies = {}  # of a network, by id: its number, and the step it was last seen in
        self.shaken = set()  # ids
        self.names, self.parameters = {}, {}  # id: name, and name: tensor
        self.watched = set()  # names of buffers, but for masks with infinities
        self.optimizers = weakref.WeakSet()
        self.failed, self.cut = Counter(), False  # cut: by FSDP1, which no tensor tells
        self.busy = False  # within a forward or a backward, whose inner calls are not watched
        self.backwards = 0
        self.local = {}  # gradients of the backward that runs, before DDP averages them
        self.record = None  # of the optimizer that steps
        self.stepped, self.stepped_after = set(), -1  # optimizers of this step; backwards before
        self.ids, self.drawn = {}, deque(maxlen=64)  # samples, by hash and by batch
        self.new_step()

    def new_step(self):
        self.calls, self.pieces, self.clips, self.unsplit = [], [], [], False
        self.buffers = {}
        self.computed = deque(maxlen=8)  # outputs, which may go into another network

    def attempt(self, method, *args):
        """Call a method of this class. What fails is counted, and None is returned."""
        try:
            return method(*args)
        except Exception as error:
            self.failed[f"{method.__name__}: {type(error).__name__}: {error}"[:200]] += 1

    def write(self, kind, **values):
        if self.file is None:
            self.file = open(f"{self.folder}/{os.getpid()}.pkl", "ab", 1 << 20)  # noqa: SIM115
        pickle.dump({"kind": kind, **values}, self.file, pickle.HIGHEST_PROTOCOL)
        self.file.flush()  # a program that hangs is killed

    def begin(self):
        """Take rank, world size, and the steps that an earlier process of this rank has made."""
        self.rank, self.world = group()
        if self.number is None:
            self.number, path = 0, f"{self.folder}/{self.rank}.steps"
            if os.path.exists(path):
                self.number, self.shake = os.path.getsize(path), False

    @property
    def made(self):
        """Return how many steps are made."""
        return (self.number or 0) + bool(self.stepped)

    # ---- the network: nn.Module.__call__, of a module that is not called by another one ----------

    def before_call(self, args, kwargs):
        module, *inputs = args
        parameters = [] if self.busy else self.meet(module)
        if not parameters:  # a loss, or a wrapper
            return None
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        if trained and id(module) not in self.networks:
            self.first_call(module)
        if trained and self.watched and not self.calls:
            self.buffers = pack({n: b for n, b in module.named_buffers() if n in self.watched})
        known = id(parameters[0]) in self.names
        if not trained and not known and [p.shape for p in parameters] in self.shapes:
            self.keep_copy(module)
        self.busy, samples = True, None
        if trained or (known and not module.training):
            samples = self.attempt(self.samples_of, (inputs, kwargs), trained and module.training)
        return trained, samples

    def after_call(self, seen, output, args):
        if not seen:
            return
        self.busy = False
        (trained, samples), module = seen, args[0]
        outputs = [t.detach() for t in flat(output) if t.is_floating_point()]
        self.computed += outputs
        rows = [t for t in outputs if samples and t.dim() and len(t) == len(samples)]
        if trained:
            split = rows or (
                samples and samples[0][2] is not None
            )  # or the loader told the samples
            self.unsplit |= not split and samples != ()
            call = {"network": self.networks.index(id(module)), "training": module.training}
            call |= {"samples": samples if split else ()}
            call |= {"outputs": signatures(rows[0]) if rows else None}
            self.calls.append(call | {"dtype": computed_in(outputs)})
        elif samples and rows:
            self.write("evaluated", samples=samples, step=self.made)

    def meet(self, module):
        """Return the parameters of a network; none of a wrapper, which calls the network."""
        if id(module) not in self.modules:
            wrapper = WRAPPERS.intersection(kind.__name__ for kind in type(module).__mro__)
            self.cut |= "FullyShardedDataParallel" in wrapper
            parameters = [] if wrapper or get_worker_info() else list(module.parameters())
            if any(map(torch.nn.parameter.is_lazy, parameters)):
                return []
            self.modules[id(module)] = module, parameters
        return self.modules[id(module)][1]

    def first_call(self, module):
        """Make a network even before its first training forward; describe it."""
        self.begin()
        self.networks.append(id(module))
        layers, parameters = list(module.modules()), list(module.parameters())
        self.shapes.append([p.shape for p in parameters])
        facts = {"norms": sum("BatchNorm" in type(m).__name__ and m.training for m in layers)}
        facts |= {"drops": [p for p in map(samerun_even.drops, layers) if p]}
        facts |= {"numbers": sum(p.numel() for p in parameters)}
        self.write("network", name=type(module).__name__, **facts)
        samerun_even.network(module, self.even)
        self.shake_new(parameters)
        for name, parameter in module.named_parameters():
            name = self.give_name(name, parameter)
            if parameter.requires_grad and not hasattr(parameter, "placements"):
                parameter.register_hook(functools.partial(self.attempt, self.keep_local, name))
        floats = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        self.watched.update(n for n, b in floats.items() if b.isfinite().all())

    def shake_new(self, tensors):
        """Change the last bit of tensors that a step is about to change for the first time."""
        if self.shake:
            new = [t for t in tensors if id(t) not in self.shaken]
            samerun_even.shake(new, place)
            self.shaken.update(map(id, new))

    def give_name(self, name, tensor):
        """Return the name of a tensor; this one, or one like it, if it has none."""
        if id(tensor) not in self.names:
            while name in self.parameters:  # of another network
                name = f"other.{name}"
            self.names[id(tensor)], self.parameters[name] = name, tensor
        return self.names[id(tensor)]

    def keep_copy(self, module):
        """Keep the weights of a copy of a network, as an average is, once in a step."""
        number, step = self.copies.get(id(module), (len(self.copies), None))
        self.copies[id(module)] = number, self.made
        if step != self.made:
            weights = pack({str(i): p for i, p in enumerate(module.parameters())})
            self.write("average", number=number, step=self.made, weights=weights)

    def samples_of(self, inputs, training):
        """Return (size of the data set, epoch, index, hash of the contents) of each sample.

        Without a loader the first three are 0, 0, None. It is () of no input, and of the output of
        a network, as in a GAN.
        """
        tensors = [t for t in flat(inputs) if t.dim() and t.numel()]
        if not tensors or {t.data_ptr() for t in tensors} & {t.data_ptr() for t in self.computed}:
            return ()
        told = telling([t for t in tensors if not t.requires_grad])
        if told is None:
            return None
        hashes = hash_rows(told)
        known = [self.ids.get(h) for h in hashes]
        if None in known:  # changed since the loader gave it: the oldest batch of this size
            batch = next((b for b in self.drawn if len(b) == len(hashes)), None)
            known = batch or [(0, 0, None)] * len(hashes)
        if known in self.drawn:
            self.drawn.remove(known)
        if training:
            self.mark = self.mark or known[0][:2]
            if self.second_epoch is None and known[0][:2] != self.mark:  # of the trained ones
                self.second_epoch = self.made
        return [(*row, look) for row, look in zip(known, hashes)]

    # ---- the loader ------------------------------------------------------------------------------

    def after_iter(self, seen, iterator, args):
        """Count epochs: DataLoader.__iter__."""
        loader = args[0]
        if iterator is None or get_worker_info() or loader.batch_sampler is None:
            return
        epoch = vars(loader)["_watched_epoch"] = vars(loader).get("_watched_epoch", -1) + 1
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        vars(iterator)["_watched"] = (size, epoch)

    def before_reset(self, args, kwargs):
        """Begin an epoch of persistent workers: the iterator's _reset."""
        vars(args[0]).pop("_watched_indices", None)

    def after_index(self, seen, indices, args):
        """Keep indices: the iterator's _next_index, which runs ahead of __next__ with workers."""
        vars(args[0]).setdefault("_watched_indices", deque()).append(indices)

    def after_next(self, seen, batch, args):
        """Keep the index of each sample by its contents: the iterator's __next__."""
        waiting, mark = (vars(args[0]).get(n) for n in ("_watched_indices", "_watched"))
        indices = waiting.popleft() if waiting and mark else None
        if not isinstance(indices, (list, tuple)) or set(map(type, indices)) != {int}:
            return
        tensors = [t for t in flat(batch) if t.dim() and len(t) == len(indices) and t.numel()]
        told = telling(tensors)
        if told is not None:
            ids = [(*mark, index) for index in indices]
            self.drawn.append(ids)
            self.ids.update(zip(hash_rows(told), ids))

    # ---- backward and step -----------------------------------------------------------------------

    def before_backward(self, args, kwargs):
        """Return the loss: torch.autograd.backward, but not one within another."""
        if self.busy:
            return None
        self.busy, self.local = True, {}
        self.backwards += 1
        losses = args[0] if args else kwargs["tensors"]
        losses = [losses] if isinstance(losses, torch.Tensor) else list(losses)
        return float(sum(t.detach().sum() for t in losses))

    def after_backward(self, loss, result, args):
        """Keep loss and local gradient of a backward, if no optimizer has stepped within it."""
        if loss is not None:
            self.busy = False
            if self.stepped_after < self.backwards:
                self.pieces.append((loss, pack(self.local)))

    def keep_local(self, name, gradient):
        if self.busy:
            self.local[name] = self.local.get(name, 0) + numbers(gradient.detach())

    def before_step(self, optimizer, args, kwargs):
        """Record a step of an optimizer, as soon as its gradients are there."""
        if self.record is not None:  # an optimizer within an optimizer, as of ZeRO
            for group in self.record.get("groups", []):
                group["optimizer"] = type(optimizer).__name__
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.attempt(self.see_step, optimizer)
            return None

        def watched(*args, **kwargs):  # Lightning computes the gradients within the step
            result = closure(*args, **kwargs)
            if self.record is None:
                self.attempt(self.see_step, optimizer)
            return result

        return (args[0],), {**kwargs, "closure": watched}

    def see_step(self, optimizer):
        self.begin()
        begins = id(optimizer) in self.stepped or self.stepped_after != self.backwards
        if begins:  # else it is another optimizer of this step
            self.number, self.stepped = self.made, set()
            self.end_if_enough()
        self.optimizer, self.record = optimizer, {}
        self.stepped.add(id(optimizer))
        self.stepped_after = self.backwards
        group_of, held, unseen = {}, set(), {}
        for other in [optimizer, *(o for o in self.optimizers if o is not optimizer)]:
            for i, group in enumerate(getattr(other, "param_groups", [])):
                for tensor in group["params"]:
                    name = self.give_name(f"tensor {len(self.parameters) + 1}", tensor)
                    held.add(name)
                    if other is optimizer:
                        group_of[name] = i
        mine = {name: self.parameters[name] for name in group_of}
        self.shake_new(mine.values())  # of no network
        gradients = {n: p.grad for n, p in mine.items() if p.grad is not None}
        free = {n: p for n, p in self.parameters.items() if n not in held}
        weights = self.parameters if begins else {}  # all: something else may change them too
        shapes = {shape for network in self.shapes for shape in network}
        foreign = any(p.shape not in shapes and p.grad is not None for p in mine.values())
        if self.cut or (foreign and any(p.requires_grad for p in free.values())):
            unseen = dict.fromkeys(mine, "it is cut into pieces, as by FSDP version 1 or DeepSpeed")
            weights, gradients = {}, {}
        self.record = {
            "number": self.number,
            "time": time.monotonic(),
            "rank": self.rank,
            "world": self.world,
            "weights": pack(weights, unseen),
            "gradients": pack(gradients, unseen),
            "buffers": self.buffers,
            "types": {n: str(p.dtype)[6:] for n, p in self.parameters.items()},
            "sharded": {n for n, p in self.parameters.items() if hasattr(p, "placements")},
            "group_of": group_of,
            "groups": settings(optimizer),
            "held": sorted(held),
            "unseen": unseen,
            "calls": self.calls,
            "unsplit": self.unsplit,
            "pieces": self.pieces,
            "clips": [(s, most, [self.names.get(i) for i in ids]) for s, most, ids in self.clips],
            "failed": dict(self.failed),
        }

    def after_step(self, optimizer, args, kwargs):
        if self.record is not None and optimizer is self.optimizer:
            self.attempt(self.end_step)
            self.record = None
            self.new_step()

    def end_step(self):
        self.write("step", **self.record)
        with open(f"{self.folder}/{self.rank}.steps", "w") as file:
            file.write("." * self.made)

    def end_if_enough(self):
        """End after the last step. The first rank that has seen enough says so by a file."""
        enough = self.number >= self.steps > 0
        if not self.steps:
            late = self.number >= 5 and time.monotonic() - self.start > MOST_SECONDS
            enough = late or self.number >= MOST_STEPS
            if self.second_epoch is not None:
                enough |= self.number >= max(10, self.second_epoch + 3)
            if enough and self.world > 1:  # ranks are less than two steps apart
                open(f"{self.folder}/{self.number + 2}.stop", "w").close()
            stops = [int(n[:-5]) for n in os.listdir(self.folder) if n.endswith(".stop")]
            enough = self.number >= min(stops, default=math.inf) or (enough and self.world == 1)
        if enough or os.path.exists(f"{self.folder}/{self.rank}.done"):
            self.end()

    def end(self):
        """End once all ranks are here: the others may still need what this one sends."""
        if self.file:
            self.file.close()
        open(f"{self.folder}/{self.rank}.done", "w").close()
        until = time.monotonic() + 10
        while sum(n.endswith(".done") for n in os.listdir(self.folder)) < self.world:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        os._exit(STOPPED)

    # ---- what else happens -----------------------------------------------------------------------

    def before_clip(self, args, kwargs):
        """Keep the ids of what is clipped: clip_grad_norm_, which may take a generator."""
        args[:] = args or [kwargs.pop("parameters")]
        args[1:] = args[1:] or [kwargs.pop("max_norm")]
        if not isinstance(args[0], torch.Tensor):
            args[0] = list(args[0])
        return [id(p) for p in (args[0] if isinstance(args[0], list) else args[:1])]

    def after_clip(self, ids, norm, args):
        if args[1] != math.inf:  # which only asks for the norm
            self.clips.append((float(norm), float(args[1]), ids))


def settings(optimizer):
    """Return the class and the numbers of each group: learning rate, weight decay, momentum."""
    groups = []
    for group in optimizer.param_groups:
        kept = {"optimizer": type(optimizer).__name__}
        for key, value in group.items():
            if torch.is_tensor(value) and value.numel() == 1:
                value = float(value)
            parts = value if isinstance(value, (tuple, list)) else [value]
            if key not in NOT_SETTINGS and all(isinstance(v, (int, float, str)) for v in parts):
                kept[key] = value
        groups.append(kept)
    return groups


# ---- tensors -------------------------------------------------------------------------------------


def pack(named, unseen=None):
    """Return the numbers of tensors in float64. Why one cannot be read goes into `unseen`."""
    parts = {}
    for name, tensor in named.items():
        try:
            part = numbers(tensor.detach()).reshape(-1)
            parts[name] = part.to("cpu", torch.float64, copy=True).numpy()
        except Exception as error:
            if unseen is not None:
                unseen[name] = f"{type(error).__name__}: {error}"[:100]
    return parts


def numbers(tensor):
    """Return numbers that add up as the tensor does: over ranks, shards, pieces, with factors."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.numel() <= SMALL and not hasattr(tensor, "placements"):
        return tensor  # most tensors of a small network
    offset, part, total = place(tensor)
    rows = -(-total // WIDTH)
    part = part.reshape(-1)
    length = total if total <= SMALL else rows * WIDTH
    if len(part) < length:
        part = torch.nn.functional.pad(part, (offset, length - offset - len(part)))
    if total <= SMALL:
        return part
    table, factors = part.view(-1, WIDTH), signs(rows, part.device)
    return sum(s @ t.double() for s, t in zip(factors.split(ROWS), table.split(ROWS)))


@functools.cache
def signs(rows, device):
    """Return 1 or -1 for each row, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (rows,), generator=generator).double() * 2 - 1).to(device)


def place(tensor):
    """Return where this rank's part begins in the tensor, the part, and the size of the whole."""
    if not hasattr(tensor, "placements"):
        return 0, tensor, tensor.numel()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as where

    if [str(p) for p in tensor.placements] not in (["S(0)"], ["Shard(dim=0)"]):
        raise ValueError(f"placements {tensor.placements}")
    _, offset = where(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * math.prod(tensor.shape[1:]), tensor.to_local(), tensor.numel()


def flat(value):
    """Yield the tensors in nested tuples, lists, dicts, dataclasses and outputs of networks."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if is_dataclass(value) and not hasattr(value, "items"):
        value = vars(value)
    if hasattr(value, "items"):
        value = list(value.values())
    for item in value if isinstance(value, (tuple, list)) else ():
        yield from flat(item)


def telling(tensors):
    """Return the tensor in which most samples differ; of several the one with the most bytes.

    It is the inputs beside targets, the token ids beside their masks.
    """
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    return max(tensors, key=lambda t: (len(set(hash_rows(t))), t.numel() * t.element_size()))


def hash_rows(tensor):
    """Return a hash of each row's bits. Zeros at its end change nothing: they pad token ids."""
    rows = tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8).cpu().numpy()
    rows = rows.view(f"i{min(8, tensor.element_size())}").astype("i8")
    return (rows @ odd_numbers(rows.shape[1])).tolist()


@functools.cache
def odd_numbers(size):
    """Return a large odd factor for each place of a row, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1).numpy()


def computed_in(outputs):
    """Return the type in which a network computes: that of autocast, or of its outputs."""
    if not outputs:
        return ""
    device = outputs[0].device.type
    autocast = torch.is_autocast_enabled(device)
    return str(torch.get_autocast_dtype(device) if autocast else outputs[0].dtype)[6:]


def signatures(rows):
    """Return sum and norm of each sample's output, and how many numbers they are."""
    rows = rows.reshape(len(rows), -1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    both = torch.stack([rows.sum(1, dtype=torch.float64), norms], 1)
    return rows.shape[1], both.cpu().numpy()


def group():
    """Return rank and number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- installation --------------------------------------------------------------------------------


def watch(watcher, owner, name, before=None, after=None):
    """Call `before` before a function of torch, and `after` after it, also if it raises."""
    function = getattr(owner, name, None)

    @functools.wraps(function)
    def stand_in(*args, **kwargs):
        args = list(args)
        seen = watcher.attempt(before, args, kwargs) if before else None
        result = None
        try:
            result = function(*args, **kwargs)
            return result
        finally:
            if after:
                watcher.attempt(after, seen, result, args)

    if function is not None:  # in this version of torch
        setattr(owner, name, stand_in)


def install():
    """Put the watcher in place. torch calls this at the end of its import."""
    if "SAMERUN_DIR" not in os.environ:
        return
    watcher, iterator = Watcher(), dataloader._BaseDataLoaderIter
    put = functools.partial(watch, watcher)
    put(torch.nn.Module, "__call__", watcher.before_call, watcher.after_call)
    put(DataLoader, "__iter__", after=watcher.after_iter)
    put(iterator, "_reset", watcher.before_reset)
    put(iterator, "_next_index", after=watcher.after_index)
    put(iterator, "__next__", after=watcher.after_next)
    put(torch.autograd, "backward", watcher.before_backward, watcher.after_backward)
    put(torch.nn.utils, "clip_grad_norm_", watcher.before_clip, watcher.after_clip)
    put(optimizer.Optimizer, "__init__", after=lambda s, r, args: watcher.optimizers.add(args[0]))
    average = swa_utils.AveragedModel
    put(average, "update_parameters", after=lambda s, r, args: watcher.keep_copy(args[0]))
    optimizer.register_optimizer_step_pre_hook(watcher.before_step)
    optimizer.register_optimizer_step_post_hook(watcher.after_step)
    os.register_at_fork(after_in_child=watcher.__init__)
    samerun_even.before_all(watcher.even)
