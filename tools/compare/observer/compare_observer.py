"""Watch a training program from outside.

compare.py puts this directory on PYTHONPATH, and names a directory in COMPARE_DIR. torch calls
`install` when it is imported: compare_observer-1.dist-info says that it is an extension of torch.
Each process that trains writes what it saw to COMPARE_DIR/PID.pkl, one record for each step of an
optimizer, and ends after the last step to be seen. COMPARE_DIR/plan.json says how many steps, and
what to make even (compare_even.py). The observer draws no random number and calls no collective:
it changes no bit of a run.
"""

import functools
import json
import math
import os
import pickle
import time
from collections import Counter, deque

import compare_even
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, optimizer
from torch.utils.data import DataLoader, dataloader, get_worker_info

FOLDER = os.environ["COMPARE_DIR"]
SMALL, WIDTH = 1024, 256  # of a tensor with more than SMALL numbers, WIDTH signed sums are kept
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
WRAPPERS |= {"_FabricModule", "LightningModule"}  # modules that call the network
MOST_STEPS, MOST_SECONDS = 60, 60  # if --steps is not given
NOT_SETTINGS = {"params", "param_names", "initial_lr", "foreach", "fused"}


class Watcher:
    def __init__(self):
        """Begin anew: at the start, and in a forked process."""
        with open(f"{FOLDER}/plan.json") as file:
            plan = json.load(file)  # {"steps": N, "shake": true, "even": {...}}
        self.steps, self.shake, self.even = plan["steps"], plan["shake"], plan["even"]
        self.count, self.file, self.world = 0, None, 1
        self.start, self.second_epoch = time.monotonic(), None
        self.modules = {}  # id: (module, its parameters), of those called from outside
        self.networks = []  # ids of those that were trained
        self.names, self.parameters = {}, {}  # id: name, and name: parameter, of these
        self.watched = set()  # names of buffers, but for masks with infinities
        self.held = set()  # ids of the parameters that an optimizer holds
        self.events = Counter()  # wrappers that were called, schedulers' steps, and others
        self.busy = False  # within a forward or a backward, whose inner calls are not watched
        self.local = {}  # gradients of the backward that runs, before DDP averages them
        self.hooks = []  # which keep them
        self.record = None  # of the step that runs
        self.ids, self.drawn = {}, deque(maxlen=64)  # samples, by hash and by batch
        self.new_step()

    def new_step(self):
        self.calls, self.pieces, self.clips = [], [], []
        self.buffers = pack({})
        self.computed = deque(maxlen=8)  # outputs, which may go into another network

    def write(self, kind, **values):
        if self.file is None:
            self.file = open(f"{FOLDER}/{os.getpid()}.pkl", "ab", 1 << 20)  # noqa: SIM115
        pickle.dump({"kind": kind, **values}, self.file, pickle.HIGHEST_PROTOCOL)
        self.file.flush()  # a program that hangs is killed

    # ---- the network -----------------------------------------------------------------------------

    def call(self, function, module, *args, **kwargs):
        """Stand in for nn.Module.__call__, of a module that is not called by another one."""
        parameters = [] if self.busy else self.meet(module)
        if not parameters:  # a loss, or a wrapper
            return function(module, *args, **kwargs)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        if trained and id(module) not in self.networks:
            self.first_call(module)
        if trained and self.watched and not self.calls:
            self.buffers = pack({n: b for n, b in module.named_buffers() if n in self.watched})
        known = trained or (not module.training and id(parameters[0]) in self.names)
        samples = self.samples_of(args, kwargs, trained and module.training) if known else None
        self.busy = True
        try:
            output = function(module, *args, **kwargs)
        finally:
            self.busy = False
        outputs = [t.detach() for t in flat(output) if t.is_floating_point()]
        self.computed += outputs
        if samples and trained:
            of_samples = (t for t in outputs if t.dim() and len(t) == len(samples[0]))
            call = {"samples": samples, "dtype": str(outputs[0].dtype)[6:] if outputs else ""}
            call |= {"outputs": next(map(signatures, of_samples), None)}
            call |= {"network": self.networks.index(id(module)), "training": module.training}
            self.calls.append(call)
        elif samples:
            self.write("evaluated", samples=samples, step=self.count)
        return output

    def meet(self, module):
        """Return the parameters of a network; none of a wrapper, which calls the network."""
        if id(module) not in self.modules:
            wrapper = WRAPPERS.intersection(kind.__name__ for kind in type(module).__mro__)
            self.events.update(wrapper)
            parameters = [] if wrapper or get_worker_info() else list(module.parameters())
            if any(map(torch.nn.parameter.is_lazy, parameters)):
                return []
            self.modules[id(module)] = module, parameters
        return self.modules[id(module)][1]

    def first_call(self, module):
        """Make a network even before its first training forward, name its parameters, describe it."""
        self.networks.append(id(module))
        with torch.no_grad():
            number = len(self.networks)
            compare_even.network(module, number, self.even, FOLDER, group()[0], place)
            if self.shake:
                compare_even.shake(module, place)
        for name, parameter in module.named_parameters():
            if id(parameter) in self.names:
                continue
            while name in self.parameters:  # of another network
                name = f"other.{name}"
            self.names[id(parameter)], self.parameters[name] = name, parameter
            if parameter.requires_grad and not hasattr(parameter, "placements"):
                keep = functools.partial(self.keep_local, name)
                self.hooks.append(parameter.register_hook(keep))
        floats = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        self.watched.update(n for n, b in floats.items() if b.isfinite().all())
        layers = list(module.modules())
        facts = {"norms": sum("BatchNorm" in type(m).__name__ and m.training for m in layers)}
        facts |= {"noises": sum(bool(compare_even.drops(m)) for m in layers)}
        parameters = list(module.parameters())
        facts |= {"numbers": sum(p.numel() for p in parameters)}
        facts |= {"dtypes": sorted({str(p.dtype)[6:] for p in parameters})}
        self.write("network", name=type(module).__name__, **facts)

    def samples_of(self, args, kwargs, training):
        """Return marks, indices and hashes of what goes into a network.

        Mark and index are the loader's: (size of the data set, epoch), or (0, 0) and None without.
        """
        inputs = largest([t for t in flat((args, kwargs)) if t.dim() and t.numel()])
        if inputs is None or inputs.requires_grad:
            return None
        if any(inputs.data_ptr() == t.data_ptr() for t in self.computed):
            return None  # by another network: a GAN
        hashes = hash_rows(inputs)
        known = [self.ids.get(h) for h in hashes]
        if None in known:  # changed since the loader gave it: the oldest batch of this size
            batch = next((b for b in self.drawn if len(b) == len(hashes)), None)
            known = batch or [((0, 0), None)] * len(hashes)
        if known in self.drawn:
            self.drawn.remove(known)
        marks, indices = zip(*known)
        if training and self.second_epoch is None and marks[0][1]:
            self.second_epoch = self.count
        return marks, indices, hashes

    # ---- the loader ------------------------------------------------------------------------------

    def start_epoch(self, function, loader):
        """Stand in for DataLoader.__iter__: say which sampler draws, and count epochs."""
        if get_worker_info() or loader.batch_sampler is None:
            return function(loader)
        epoch = vars(loader)["_watched_epoch"] = vars(loader).get("_watched_epoch", -1) + 1
        vars(loader._iterator or loader).pop("_watched_indices", None)  # of persistent workers
        sampler = loader.batch_sampler
        while inner := getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None):
            sampler = inner
        iterator = function(loader)
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        vars(iterator)["_watched"] = (size, epoch)
        if epoch and self.count and self.second_epoch is None:
            self.second_epoch = self.count  # also where a sampler yields no plain indices
        facts = {"sampler": type(sampler).__name__, "shuffle": getattr(sampler, "shuffle", None)}
        extra = (getattr(sampler, "total_size", None) or size) - size
        self.write("epoch", size=size, extra=extra, **facts)
        return iterator

    def next_index(self, function, iterator):
        """Stand in for the iterator's _next_index, which runs ahead of __next__ with workers."""
        indices = function(iterator)
        vars(iterator).setdefault("_watched_indices", deque()).append(indices)
        return indices

    def next_batch(self, function, iterator):
        """Stand in for the iterator's __next__: keep the index of each sample by its contents."""
        batch = function(iterator)
        waiting, mark = (vars(iterator).get(n) for n in ("_watched_indices", "_watched"))
        indices = waiting.popleft() if waiting and mark else None
        if not isinstance(indices, (list, tuple)) or set(map(type, indices)) != {int}:
            return batch
        tensors = [t for t in flat(batch) if t.dim() and t.numel()]
        inputs = largest([t for t in tensors if len(t) == len(indices)])
        if inputs is not None:
            ids = [(mark, index) for index in indices]
            self.drawn.append(ids)
            self.ids.update(zip(hash_rows(inputs), ids))
        return batch

    # ---- backward and step -----------------------------------------------------------------------

    def backward(self, function, tensors, *args, **kwargs):
        """Stand in for torch.autograd.backward: keep loss and local gradient of each."""
        if self.busy:
            return function(tensors, *args, **kwargs)
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        loss = float(sum(t.detach().sum() for t in losses))
        self.busy, self.local = True, {}
        try:
            return function(tensors, *args, **kwargs)
        finally:
            self.pieces.append((loss, pack(self.local)))
            self.busy = False

    def keep_local(self, name, gradient):
        if self.busy:
            earlier = self.local.get(name)
            self.local[name] = gradient.clone() if earlier is None else earlier + gradient

    def before_step(self, optimizer, args, kwargs):
        """Record a step of an optimizer, as soon as its gradients are there."""
        if self.record is not None:  # an optimizer within an optimizer
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self.see_step(optimizer)

        def watched():  # Lightning computes the gradients within the step
            result = closure()
            if self.record is None:
                self.see_step(optimizer)
            return result

        return (args[0],), {**kwargs, "closure": watched}

    def see_step(self, optimizer):
        pairs = [(i, p) for i, g in enumerate(optimizer.param_groups) for p in g["params"]]
        self.held.update(id(p) for _, p in pairs)
        group_of = {self.names[id(p)]: i for i, p in pairs if id(p) in self.names}
        free = {n: p for n, p in self.parameters.items() if id(p) not in self.held}
        mine = {n: self.parameters[n] for n in group_of} | free
        if "gradient" in self.even:
            for parameter in [p for _, p in pairs if p.grad is not None]:
                parameter.grad.div_(self.even["gradient"])
        groups = self.settings = settings(optimizer)
        if self.count < len(self.even.get("settings", [])):
            give_settings(optimizer, self.even["settings"][self.count])
            groups = settings(optimizer)
        rank, self.world = group()
        self.optimizer = optimizer
        gradients = {n: p.grad for n, p in mine.items() if p.grad is not None}
        self.record = {"rank": rank, "events": dict(self.events)}
        self.record |= {"optimizer": type(optimizer).__name__, "groups": groups}
        self.record |= {"group_of": group_of, "strange": len(pairs) - len(group_of)}
        self.record |= {"forgotten": [n for n, p in free.items() if p.requires_grad]}
        self.record |= {"sharded": any(hasattr(p, "placements") for p in mine.values())}
        self.record |= {"weights": pack(mine), "gradients": pack(gradients)}
        self.record |= {"calls": self.calls, "pieces": self.pieces, "clips": self.clips}
        self.record |= {"buffers": self.buffers, "second_epoch": self.second_epoch is not None}

    def after_step(self, optimizer, args, kwargs):
        if self.record is None or optimizer is not self.optimizer:
            return
        if "settings" in self.even:
            give_settings(optimizer, self.settings)
        self.write("step", **self.record)
        if self.world == 1 and len(self.pieces) == 1:  # which is the gradient of the step
            while self.hooks:
                self.hooks.pop().remove()
        self.record = None
        self.new_step()
        self.count += 1
        if self.last_step():
            self.end()

    def last_step(self):
        """Say whether to end here. The first rank that has seen enough tells the others by a file."""
        if self.steps:
            return self.count >= self.steps
        again = self.second_epoch is not None and self.count >= max(10, self.second_epoch + 3)
        late = self.count >= 3 and time.monotonic() - self.start > MOST_SECONDS
        enough = again or late or self.count >= MOST_STEPS
        if self.world == 1:
            return enough
        if enough:  # ranks are less than two steps apart
            open(f"{FOLDER}/{self.count + 2}.stop", "w").close()
        stops = [int(n[:-5]) for n in os.listdir(FOLDER) if n.endswith(".stop")]
        return self.count >= min(stops, default=math.inf)

    def end(self):
        """End once all ranks are here: the others may still need what this one sends."""
        self.file.close()
        open(f"{FOLDER}/{group()[0]}.done", "w").close()
        until = time.monotonic() + 10
        while sum(n.endswith(".done") for n in os.listdir(FOLDER)) < self.world:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        os._exit(0)

    # ---- what else happens -----------------------------------------------------------------------

    def clip(self, function, parameters, max_norm, *args, **kwargs):
        """Stand in for clip_grad_norm_."""
        norm = function(parameters, max_norm, *args, **kwargs)
        self.clips.append((float(norm), float(max_norm)))
        return norm

    def count_event(self, event, function, *args, **kwargs):
        self.events[event] += 1
        return function(*args, **kwargs)


def settings(optimizer):
    """Return the numbers of each group: learning rate, weight decay, momentum."""
    groups = []
    for group in optimizer.param_groups:
        kept = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
        groups.append({k: float(v) if torch.is_tensor(v) else v for k, v in kept.items()})
    return groups


def give_settings(optimizer, groups):
    """Give the groups other values, if there are as many."""
    if len(groups) == len(optimizer.param_groups):
        for group, values in zip(optimizer.param_groups, groups):
            group.update(values)


# ---- tensors -------------------------------------------------------------------------------------


def pack(named):
    """Return names, sizes, dtype and numbers of tensors, by one copy to the CPU for all of them."""
    if not named:
        return [], [], "float32", b""
    parts = [numbers(t.detach()).reshape(-1) for t in named.values()]
    sizes = [len(part) for part in parts]
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    whole = torch.cat(parts).cpu()
    whole = whole if whole.dtype == torch.float32 else whole.double()
    return list(named), sizes, str(whole.dtype)[6:], whole.numpy().tobytes()


def numbers(tensor):
    """Return numbers that add up as the tensor does: over ranks, shards, pieces, with factors."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.numel() <= SMALL and not hasattr(tensor, "placements"):
        return tensor  # most tensors of a small network
    offset, part, total = place(tensor)
    rows = -(-total // WIDTH)
    part = part.reshape(-1)
    length = total if total <= SMALL else rows * WIDTH
    if len(part) < length:
        part = torch.nn.functional.pad(part, (offset, length - offset - len(part)))
    return part if total <= SMALL else signs(rows, part.device) @ part.double().view(-1, WIDTH)


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

    _, offset = where(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * math.prod(tensor.shape[1:]), tensor.to_local(), tensor.numel()


def flat(value):
    """Yield the tensors in nested tuples, lists, dicts and outputs of networks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)) or hasattr(value, "items"):
        for item in value.values() if hasattr(value, "items") else value:
            yield from flat(item)


def largest(tensors):
    """Return the tensor with the most bytes for each sample: the inputs, beside targets.

    Of several, as token ids and their masks, it is the one in which most samples differ.
    """
    sizes = [t.numel() * t.element_size() // len(t) for t in tensors]
    ties = [t for t, size in zip(tensors, sizes) if size == max(sizes)]
    if len(ties) > 1:
        return max(ties, key=lambda t: len(set(hash_rows(t))))
    return ties[0] if ties else None


def hash_rows(tensor):
    """Return a hash of each row's bits. Zeros at its end change nothing: they pad token ids."""
    rows = tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8).cpu().numpy()
    rows = rows.view(f"i{min(8, tensor.element_size())}").astype("i8")
    return (rows @ odd_numbers(rows.shape[1])).tolist()


@functools.cache
def odd_numbers(size):
    """Return a large odd factor for each place of a row, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(-(2**62), 2**62, (size,), generator=generator)
    return (places * 2 + 1).numpy()


def signatures(rows):
    """Return sum and norm of each sample's output, and how many numbers they are."""
    rows = rows.reshape(len(rows), -1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    both = torch.stack([rows.sum(1, dtype=torch.float64), norms], 1)
    return rows.shape[1], both.cpu().numpy().tobytes()


def group():
    """Return rank and number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


# ---- installation --------------------------------------------------------------------------------


def replace(owner, name, method):
    """Put a method of the watcher where a function stands, which is its first argument."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def stand_in(*args, **kwargs):
        return method(function, *args, **kwargs)

    setattr(owner, name, stand_in)


def install():
    """Put the watcher in place. torch calls this at the end of its import."""
    watch, iterator = Watcher(), dataloader._BaseDataLoaderIter
    replace(torch.nn.Module, "__call__", watch.call)
    replace(DataLoader, "__iter__", watch.start_epoch)
    replace(iterator, "__next__", watch.next_batch)
    replace(iterator, "_next_index", watch.next_index)
    replace(torch.autograd, "backward", watch.backward)
    replace(torch.nn.utils, "clip_grad_norm_", watch.clip)
    for owner, name, event in (
        (lr_scheduler.LRScheduler, "step", "scheduler"),
        (DistributedDataParallel, "__init__", "DDP made"),
        (torch, "compile", "compile"),
    ):
        replace(owner, name, functools.partial(watch.count_event, event))
    optimizer.register_optimizer_step_pre_hook(watch.before_step)
    optimizer.register_optimizer_step_post_hook(watch.after_step)
    os.register_at_fork(after_in_child=watch.__init__)
    compare_even.before_all(watch.even)
