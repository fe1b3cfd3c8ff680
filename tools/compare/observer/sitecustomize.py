"""Watch a training program from outside. Python imports this module at its start, by its name.

compare.py puts this directory on PYTHONPATH, and names a directory in COMPARE_DIR. There each
process that trains writes what it saw to PID.pkl, one record for each step of an optimizer, and
ends after the last step to be seen. COMPARE_DIR/plan.json says how many steps, and what to make
even (even.py). The observer draws no random numbers and calls no collectives: it changes no bit.
"""

import functools
import importlib.util
import json
import math
import os
import pickle
import sys
import time
from collections import deque
from importlib.machinery import PathFinder

FOLDER = os.environ.get("COMPARE_DIR")
SMALL, WIDTH = 1024, 256  # of a tensor with more than SMALL numbers, WIDTH signed sums are kept
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"}
WRAPPERS |= {"_FabricModule", "LightningModule"}  # modules that call the network
PREFIXES = {"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped"}
MOST_STEPS, MOST_SECONDS = 60, 60  # if --steps is not given


class Watcher:
    def __init__(self):
        with open(f"{FOLDER}/plan.json") as file:
            self.plan = json.load(file)  # {"steps": N, "shake": true, "even": {...}}
        self.even = self.plan["even"]
        self.reset()

    def reset(self):
        """Begin anew: at the start, and in a forked process."""
        self.count, self.file, self.world = 0, None, 1
        self.start = time.monotonic()
        self.stop, self.second_epoch = self.plan["steps"], None
        self.modules = {}  # id: (module, its parameters), of those called from outside
        self.names, self.parameters = {}, {}  # id: name, and name: parameter
        self.networks = []  # those that were trained
        self.watched = set()  # names of buffers, but for masks with infinities
        self.held = set()  # ids of the parameters that an optimizer holds
        self.wrappers = set()  # that were called
        self.busy = False  # within a forward or a backward, whose inner calls are not watched
        self.local = None  # gradients of the backward that runs, before DDP averages them
        self.record = None  # of the step that runs
        self.several = False  # backwards in the step before
        self.ids, self.drawn, self.seen = {}, deque(maxlen=64), set()  # samples
        self.new_step()

    def new_step(self):
        self.calls, self.pieces, self.clips = [], [], []
        self.told = 0  # calls before the last backward
        self.schedulers, self.evaluated, self.buffers = 0, [], pack({})
        self.computed = deque(maxlen=8)  # outputs, which may go into another network

    def write(self, kind, **values):
        if self.file is None:
            self.file = open(f"{FOLDER}/{os.getpid()}.pkl", "ab", 1 << 20)  # noqa: SIM115
        pickle.dump({"kind": kind, **values}, self.file)
        self.file.flush()  # a program that hangs is killed

    # ---- the network -----------------------------------------------------------------------------

    def call(self, module, args, kwargs):
        """Stand in for nn.Module.__call__, of a module that is not called by another one."""
        _, parameters = self.modules.get(id(module)) or self.meet(module)
        wrapper = (
            any(c.__name__ in WRAPPERS for c in type(module).__mro__) and type(module).__name__
        )
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        trained = trained and id(module) in self.modules  # not lazy any more
        if wrapper or in_worker() or not parameters:
            self.wrappers.update([wrapper] if wrapper else [])
            return original["call"](module, *args, **kwargs)
        if trained and id(module) not in self.networks:
            self.first_call(module)
        if trained and not self.calls:
            named = module.named_buffers()
            self.buffers = pack({plain(n): b for n, b in named if plain(n) in self.watched})
        known = trained or (not module.training and id(parameters[0]) in self.names)
        samples = self.samples_of(args, kwargs, trained and module.training) if known else []
        self.busy = True
        try:
            output = original["call"](module, *args, **kwargs)
        finally:
            self.busy = False
        if samples and not trained:
            self.evaluated += samples
        outputs = list(flat(output))
        self.computed += [t.detach() for t in outputs]
        if samples and trained:
            rows = next((t for t in outputs if t.dim() and len(t) == len(samples)), None)
            call = {"samples": samples, "dtype": str(outputs[0].dtype)[6:] if outputs else ""}
            call |= {"outputs": None if rows is None else signatures(rows)}
            call |= {"network": self.networks.index(id(module)), "training": module.training}
            self.calls.append(call)
        return output

    def meet(self, module):
        """Learn a module's parameters and their names, at its first training call from outside."""
        parameters = list(module.parameters())
        if not torch.is_grad_enabled() or any(map(torch.nn.parameter.is_lazy, parameters)):
            return module, parameters
        self.modules[id(module)] = module, parameters
        for name, parameter in module.named_parameters():
            if id(parameter) in self.names:
                continue
            name = plain(name)
            while name in self.parameters:  # of another network
                name = f"other.{name}"
            self.names[id(parameter)], self.parameters[name] = name, parameter
            if parameter.requires_grad and not hasattr(parameter, "placements"):
                parameter.register_hook(functools.partial(self.keep_local, name))
        return module, parameters

    def first_call(self, module):
        """Make a network even before its first forward, and describe it."""
        self.networks.append(id(module))
        even.even_network(module, len(self.networks), self.even, FOLDER, place, group()[0])
        if self.plan["shake"]:
            even.shake(module, place)
        floats = {n: b for n, b in module.named_buffers() if b.is_floating_point()}
        self.watched.update(plain(n) for n, b in floats.items() if b.isfinite().all())
        modules = [(type(m).__name__, m) for m in module.modules()]
        norms = [kind for kind, m in modules if "BatchNorm" in kind and m.training]
        noises = [kind for kind, m in modules if kind.startswith(even.NOISES) and even.rate(m)]
        numbers = sum(p.numel() for p in module.parameters())
        dtypes = sorted({str(p.dtype)[6:] for p in module.parameters()})
        facts = {"norms": norms, "noises": noises, "numbers": numbers, "dtypes": dtypes}
        self.write("network", name=type(module).__name__, **facts)

    def samples_of(self, args, kwargs, training):
        """Return of each sample that goes into the network: (id, epoch, hash, hash of its target).

        The id is what the loader calls it: (size of the data set, index), or None without one.
        """
        given = args[0] if args else None
        if isinstance(given, (list, tuple)) and all(getattr(t, "ndim", 0) == 3 for t in given):
            hashes = [hash_rows(t[None])[0] for t in given]  # detection: images of any size
        else:
            tensors = [t for t in flat((args, kwargs)) if t.dim() and len(t)]
            inputs = largest(tensors)
            if inputs is None or inputs.requires_grad:
                return []
            if any(inputs.data_ptr() == t.data_ptr() for t in self.computed):
                return []  # by another network: a GAN
            hashes = hash_rows(inputs)
        known = [self.ids.get(h) for h in hashes]
        if None in known:  # changed since the loader gave it: the oldest batch of this size
            batch = next((b for b in self.drawn if len(b) == len(hashes)), None)
            known = batch or [((0, 0), None, None)] * len(hashes)
        if known in self.drawn:
            self.drawn.remove(known)
        samples = [(mark, i, h, target) for (mark, i, target), h in zip(known, hashes)]
        if training and self.second_epoch is None:
            if self.count and any(s[0][1] or s[2] in self.seen for s in samples):
                self.second_epoch = self.count
            self.seen.update(hashes)
        return samples

    # ---- the loader ------------------------------------------------------------------------------

    def start_epoch(self, loader):
        """Stand in for DataLoader.__iter__: say which sampler draws, and count epochs."""
        if in_worker() or loader.batch_sampler is None:
            return original["iter"](loader)
        epoch = vars(loader)["_watched_epoch"] = vars(loader).get("_watched_epoch", -1) + 1
        vars(loader._iterator or loader).pop("_watched_indices", None)  # of persistent workers
        sampler = loader.batch_sampler
        while inner := getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None):
            sampler = inner
        iterator = original["iter"](loader)
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0
        vars(iterator)["_watched"] = (size, epoch)
        facts = {"sampler": type(sampler).__name__, "shuffle": getattr(sampler, "shuffle", None)}
        extra = (getattr(sampler, "total_size", None) or size) - size
        self.write("epoch", epoch=epoch, size=size, extra=extra, **facts)
        return iterator

    def next_index(self, iterator):
        """Stand in for the iterator's _next_index, which runs ahead of __next__ with workers."""
        indices = original["next_index"](iterator)
        vars(iterator).setdefault("_watched_indices", deque()).append(indices)
        return indices

    def next_batch(self, iterator):
        """Stand in for the iterator's __next__: keep the index of each sample by its contents."""
        batch = original["next"](iterator)
        waiting, mark = (vars(iterator).get(n) for n in ("_watched_indices", "_watched"))
        indices = waiting.popleft() if waiting and mark else None
        if not isinstance(indices, (list, tuple)) or set(map(type, indices)) != {int}:
            return batch
        tensors = [t for t in flat(batch) if t.dim() and len(t) == len(indices)]
        if tensors:
            inputs = largest(tensors)
            targets = zip(*[hash_rows(t) for t in tensors if t is not inputs])
            targets = [sum(t) for t in targets] or [None] * len(indices)
            ids = [(mark, i, target) for i, target in zip(indices, targets)]
            self.drawn.append(ids)
            self.ids.update(zip(hash_rows(inputs), ids))
        return batch

    # ---- backward and step -----------------------------------------------------------------------

    def backward(self, tensors, *args, **kwargs):
        """Stand in for torch.autograd.backward: keep loss and local gradient of each."""
        if self.busy:
            return original["backward"](tensors, *args, **kwargs)
        if any(c["training"] for c in self.calls):  # the others were an evaluation
            self.evaluated += [s for c in self.calls if not c["training"] for s in c["samples"]]
            self.calls = [c for c in self.calls if c["training"]]
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        loss = float(sum(t.detach().sum() for t in losses))
        # A single backward of one process has the gradient of the step: kept at the start alone.
        keeps = self.count < 3 or self.world > 1 or self.several
        self.busy, self.local = True, {} if keeps else None
        try:
            return original["backward"](tensors, *args, **kwargs)
        finally:
            first = self.calls[self.told : self.told + 1]
            count = sum(len(c["samples"]) for c in first)
            self.pieces.append((count, loss, pack(self.local or {}, made=True)))
            self.busy, self.local, self.told = False, None, len(self.calls)

    def keep_local(self, name, gradient):
        if self.local is not None:
            part = numbers(gradient)
            self.local[name] = self.local[name] + part if name in self.local else part.clone()

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
        mine = {n: p for n, p in self.parameters.items() if n in group_of or id(p) not in self.held}
        even.even_gradients([p for _, p in pairs], self.even.get("gradient"))
        if len(self.calls) > self.told:  # gradients that no backward made
            self.pieces.append((0, math.nan, pack({})))
        self.settings = even.settings(optimizer)
        even.even_settings(optimizer, self.even.get("settings"), self.count)
        rank, self.world, connected = group()
        free = [n for n, p in mine.items() if id(p) not in self.held and p.requires_grad]
        frozen = [n for n, p in self.parameters.items() if not p.requires_grad]
        gradients = {n: p.grad for n, p in mine.items() if p.grad is not None}
        self.record = {"rank": rank, "world": self.world, "connected": connected}
        self.record |= {"optimizer": type(optimizer).__name__, "groups": even.settings(optimizer)}
        self.record |= {"group_of": group_of, "forgotten": free, "frozen": frozen}
        self.record |= {"strange": len(pairs) - len(group_of)}  # tensors of no network
        self.record |= {"sharded": any(hasattr(p, "placements") for p in mine.values())}
        self.record |= {"weights": pack(mine), "gradients": pack(gradients)}
        self.record |= {"calls": self.calls, "pieces": self.pieces, "clips": self.clips}
        self.record |= {"buffers": self.buffers}
        self.record |= {"wrappers": sorted(self.wrappers), "schedulers": self.schedulers}
        self.record |= {"evaluated": self.evaluated, "second_epoch": self.second_epoch is not None}
        self.optimizer = optimizer

    def after_step(self, optimizer, args, kwargs):
        if self.record is None or optimizer is not self.optimizer:
            return
        if "settings" in self.even:
            even.even_settings(optimizer, [self.settings], 0)
        self.write("step", **self.record)
        self.record, self.several = None, len(self.pieces) > 1
        self.new_step()
        self.count += 1
        if self.last_step():
            self.end()

    def last_step(self):
        """Say whether to end here. The first rank that has seen enough tells the others in a file."""
        path = f"{FOLDER}/stop"
        if not self.stop and self.world > 1 and os.path.exists(path):
            with open(path) as file:
                self.stop = int(file.read())
        elif not self.stop:
            seconds = time.monotonic() - self.start
            again = self.second_epoch is not None and self.count >= self.second_epoch + 3
            late = self.count >= 3 and seconds > MOST_SECONDS
            if (again and self.count >= 10) or late or self.count >= MOST_STEPS:
                self.stop = self.count + 2  # ranks are less than two steps apart
                with open(f"{path}.{os.getpid()}", "w") as file:
                    file.write(str(self.stop))
                os.replace(file.name, path)
        return self.stop and self.count >= self.stop

    def end(self):
        """End once all ranks are here: the others may still need what this one sends."""
        import multiprocessing

        rank, world, _ = group()
        self.file.close()
        open(f"{FOLDER}/{rank}.done", "w").close()
        until = time.monotonic() + 10
        while sum(n.endswith(".done") for n in os.listdir(FOLDER)) < world:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        for worker in multiprocessing.active_children():
            worker.kill()
        sys.stdout.flush()
        os._exit(0)

    def rest(self):
        """Keep an evaluation after the last step, when a program ends by itself."""
        if self.evaluated and self.file and not self.file.closed:
            self.write("rest", evaluated=self.evaluated)


# ---- tensors -------------------------------------------------------------------------------------


def pack(named, made=False):
    """Return names, sizes and numbers of tensors, by one copy to the CPU for all of them."""
    parts = list(named.values()) if made else [numbers(t) for t in named.values()]
    if len({p.device for p in parts}) > 1:
        parts = [p.cpu() for p in parts]
    whole = torch.cat(parts).cpu() if parts else None
    if whole is not None:
        whole = (whole if whole.dtype == torch.float32 else whole.double()).numpy()
    return list(named), [p.numel() for p in parts], whole


def numbers(tensor):
    """Return numbers that add up as the tensor does: over ranks, shards, pieces, with factors."""
    if tensor.numel() <= SMALL and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.detach().reshape(-1)  # most tensors of a small network
    offset, part, total = place(tensor.detach())
    part = (part if part.layout == torch.strided else part.to_dense()).reshape(-1)
    length = total if total <= SMALL else -(-total // WIDTH) * WIDTH
    if part.numel() < length:
        part = torch.nn.functional.pad(part, (offset, length - offset - part.numel()))
    if total > SMALL:
        part = signs(length // WIDTH, part.device) @ part.double().view(-1, WIDTH)
    return part


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
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    rows = tensor.detach().reshape(len(tensor), -1).view(bits).long()
    return (rows * odd_numbers(rows.shape[1], rows.device)).sum(1).tolist()


@functools.cache
def odd_numbers(size, device):
    """Return a large odd factor for each place of a row, the same in every process."""
    places = torch.arange(size, device=device) + 1
    places = (places ^ (places << 31)) * 0x2545F4914F6CDD1D  # wraps around, as is meant
    return (places ^ (places >> 29)) * 0x27220A95FE10D9E5 | 1


def signatures(rows):
    """Return sum and sum of squares of each sample's output, and how many numbers they are."""
    rows = rows.detach().reshape(len(rows), -1).double()
    return rows.shape[1], torch.stack([rows.sum(1), rows.square().sum(1)], 1).cpu().numpy()


def plain(name):
    return ".".join(part for part in name.split(".") if part not in PREFIXES)


def in_worker():  # of a DataLoader
    return torch.utils.data.get_worker_info() is not None


def group():
    """Return rank, number of processes, and whether there is a process group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), True
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), False


# ---- installation --------------------------------------------------------------------------------

original = {}  # what stood where the watcher stands


def install():
    """Put the watcher in place, as soon as torch has been imported."""
    import atexit

    global torch, even
    import torch.distributed
    import torch.utils.data
    from torch.optim import lr_scheduler, optimizer
    from torch.utils.data import dataloader

    above = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("_compare_even", f"{above}/even.py")
    even = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(even)

    watch, module, base = Watcher(), torch.nn.Module, dataloader._BaseDataLoaderIter
    original.update(call=module.__call__, iter=dataloader.DataLoader.__iter__, next=base.__next__)
    original.update(next_index=base._next_index, backward=torch.autograd.backward)
    call = original["call"]

    def watched_call(self, *args, **kwargs):
        return call(self, *args, **kwargs) if watch.busy else watch.call(self, args, kwargs)

    module.__call__ = watched_call
    dataloader.DataLoader.__iter__ = lambda self: watch.start_epoch(self)
    base.__next__ = lambda self: watch.next_batch(self)
    base._next_index = lambda self: watch.next_index(self)
    torch.autograd.backward = watch.backward
    optimizer.register_optimizer_step_pre_hook(watch.before_step)
    optimizer.register_optimizer_step_post_hook(watch.after_step)
    atexit.register(watch.rest)
    os.register_at_fork(after_in_child=watch.reset)

    def follow(owner, name, see):
        function = getattr(owner, name)

        @functools.wraps(function)
        def followed(*args, **kwargs):
            result = function(*args, **kwargs)
            see(args, kwargs, result)
            return result

        setattr(owner, name, followed)

    def see_clip(args, kwargs, norm):
        limit = args[1] if len(args) > 1 else kwargs["max_norm"]
        watch.clips.append((float(norm), float(limit)))

    def see_scheduler(args, kwargs, result):
        watch.schedulers += 1

    ddp = torch.nn.parallel.DistributedDataParallel
    follow(torch.nn.utils, "clip_grad_norm_", see_clip)
    follow(lr_scheduler.LRScheduler, "step", see_scheduler)
    follow(ddp, "__init__", lambda *_: watch.wrappers.add("DDP made"))
    follow(torch, "compile", lambda *_: watch.wrappers.add("compile"))
    even.install(watch.even)


class Finder:
    """Install the watcher when the program imports torch."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None:  # this Python has no torch
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            install()

        spec.loader.exec_module = execute_and_install
        return spec


def other_sitecustomize():
    """Import the sitecustomize that this one hides, if the environment has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [p for p in sys.path if os.path.abspath(p) != here]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if FOLDER and "torch" in sys.modules:  # imported before, by a server that forks
    install()
elif FOLDER:
    sys.meta_path.insert(0, Finder())
    other_sitecustomize()
