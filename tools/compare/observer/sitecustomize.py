"""Watch a training program from outside. Python imports this module at its start, by its name.

compare.py puts this directory on PYTHONPATH, and names a directory in COMPARE_DIR. There each
process that trains writes what it saw to PID.pkl, one record for each step of an optimizer, and
ends after the last step to be seen. COMPARE_DIR/plan.json says how many steps, and what to make
even (even.py). The observer draws no random numbers and calls no collectives: it changes no bit.
"""

import functools
import hashlib
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
WIDTH = 256  # numbers kept of a tensor: all of a small one, signed sums of a large one
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

    def reset(self):  # a forked process begins anew
        self.count, self.file, self.start = 0, None, time.monotonic()
        self.stop, self.second_epoch = self.plan["steps"], None
        self.names, self.parameters, self.networks = {}, {}, []
        self.known, self.described = set(), set()
        self.held = set()  # ids of all parameters that an optimizer holds
        self.wrapped, self.inside, self.zeroed = {}, False, False
        self.piece = self.record = None  # of the backward and the step that are being made
        self.ids, self.drawn, self.taken = {}, deque(maxlen=64), set()
        self.new_step()

    def new_step(self):
        self.calls, self.pieces, self.events, self.clips = [], [], [], []
        self.schedulers, self.evaluated, self.buffers = 0, [], {}
        self.thrown = 0  # samples whose gradients zero_grad threw away
        self.computed = deque(maxlen=8)  # outputs, which may go into another network

    def write(self, kind, **values):
        if self.file is None:
            self.file = open(f"{FOLDER}/{os.getpid()}.pkl", "ab")  # noqa: SIM115
        pickle.dump({"kind": kind, **values}, self.file)
        self.file.flush()

    # ---- the network -----------------------------------------------------------------------------

    def call(self, module, *args, **kwargs):
        """Stand in for nn.Module.__call__; look at the outermost call of a network."""
        if self.inside or self.piece is not None or in_worker():
            return original["call"](module, *args, **kwargs)
        parameters = list(module.parameters())
        if not parameters or any(map(torch.nn.parameter.is_lazy, parameters)):
            return original["call"](module, *args, **kwargs)
        wrapper = WRAPPERS.intersection(c.__name__ for c in type(module).__mro__)
        training = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        if wrapper or training:
            self.wrapped.update(dict.fromkeys(wrapper, True))
            self.learn_names(module)
        if wrapper:
            return original["call"](module, *args, **kwargs)
        if training:
            if all(module is not n for n in self.networks):
                self.first_call(module)
            if module.training and id(module) not in self.described:
                self.describe(module)
            if not self.calls and not self.pieces:
                named = ((n, b) for n, b in module.named_buffers() if b.is_floating_point())
                self.buffers = {plain(n): sketch(b) for n, b in named}
        looks = training or (not module.training and id(parameters[0]) in self.names)
        samples = self.look(args, kwargs, training and module.training) if looks else None
        self.inside = True
        try:
            output = original["call"](module, *args, **kwargs)
        finally:
            self.inside = False
        if torch.is_grad_enabled() or module.training:
            self.computed += [t.detach() for t in flat(output)]
        if samples and training:
            tensors = [t for t in flat(output) if t.grad_fn is not None]
            rows = next((t for t in tensors if t.dim() and len(t) == len(samples)), None)
            cast = str(next(iter(tensors)).dtype)[6:] if tensors else ""
            outputs = [None] * len(samples) if rows is None else signatures(rows)
            network = next(i for i, n in enumerate(self.networks) if n is module)
            found = {"samples": samples, "outputs": outputs, "dtype": cast, "network": network}
            self.calls.append(found | {"training": module.training})
        elif samples:
            self.evaluated += samples
        return output

    def learn_names(self, module):
        if id(module) in self.known:
            return
        self.known.add(id(module))
        for name, parameter in module.named_parameters():
            if id(parameter) in self.names:
                continue
            name = plain(name)
            while name in self.parameters:  # of another network
                name = f"other.{name}"
            self.names[id(parameter)], self.parameters[name] = name, parameter
            if parameter.requires_grad and not hasattr(parameter, "placements"):
                parameter.register_hook(lambda g, name=name: self.local_gradient(name, g))

    def first_call(self, module):
        self.networks.append(module)
        even.even_network(module, len(self.networks), self.even, FOLDER, place, rank_and_world()[0])
        if self.plan["shake"]:
            even.shake(module, place)

    def describe(self, module):
        self.described.add(id(module))
        modules = [(n, type(m).__name__, m) for n, m in module.named_modules()]
        norms = [n for n, kind, m in modules if "BatchNorm" in kind and m.training]
        sync = all(kind == "SyncBatchNorm" for n, kind, _ in modules if n in norms)
        noises = [n for n, kind, m in modules if kind.startswith(even.NOISES) and even.rate(m)]
        numbers = sum(p.numel() for p in module.parameters())
        dtypes = sorted({str(p.dtype)[6:] for p in module.parameters()})
        facts = {"norms": norms, "sync": sync, "noises": noises, "numbers": numbers}
        self.write("network", name=type(module).__name__, dtypes=dtypes, **facts)

    def look(self, args, kwargs, training):
        """Return of each sample that goes into the network: (id, epoch, hash, hash of its target)."""
        given = args[0] if args else None
        if isinstance(given, (list, tuple)) and all(getattr(t, "ndim", 0) == 3 for t in given):
            hashes = [hash_rows([t[None]])[0] for t in given]  # detection: images of any size
        else:
            tensors = [t for t in flat((args, kwargs)) if t.dim() and len(t)]
            tensors = [t for t in tensors if not t.requires_grad]
            made = {t.data_ptr() for t in self.computed}
            if not tensors or largest(tensors).data_ptr() in made:  # by another network: a GAN
                return None
            hashes = hash_rows([largest(tensors)], tensors)
        found = [self.ids.get(h) for h in hashes]
        if all(found):
            samples = [(*k[0][:2], h, k[0][2]) for k, h in zip(found, hashes)]
            for k in found:  # equal samples take turns
                k.append(k.pop(0))
        else:  # changed since the loader gave it: the newest batch of this size
            batch = next((b for b in reversed(self.drawn) if len(b) == len(hashes)), None)
            batch = batch or [(None, 0, None)] * len(hashes)
            samples = [(i, epoch, h, target) for (i, epoch, target), h in zip(batch, hashes)]
        ids = {s[:2] for s in samples}
        self.drawn = deque((b for b in self.drawn if b[0][:2] not in ids), maxlen=64)
        if training and self.second_epoch is None:
            again = any(s[1] or s[2] in self.taken for s in samples)
            self.second_epoch = self.count if again and self.count else None
        self.taken.update(hashes if training else ())
        return samples

    # ---- the loader ------------------------------------------------------------------------------

    def start_epoch(self, loader):
        if in_worker() or loader.batch_sampler is None:
            return original["iter"](loader)
        epoch = loader.__dict__["_watched_epoch"] = loader.__dict__.get("_watched_epoch", -1) + 1
        vars(loader._iterator or loader).pop("_watched_indices", None)  # of persistent workers
        sampler = loader.batch_sampler
        while inner := getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None):
            sampler = inner
        iterator = original["iter"](loader)
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        vars(iterator)["_watched"] = (size, epoch)
        extra = (getattr(sampler, "total_size", None) or size or 0) - (size or 0)
        facts = {"sampler": type(sampler).__name__, "extra": extra, "size": size}
        self.write("epoch", epoch=epoch, shuffle=getattr(sampler, "shuffle", None), **facts)
        return iterator

    def next_index(self, iterator):
        indices = original["next_index"](iterator)
        if not in_worker():
            vars(iterator).setdefault("_watched_indices", deque()).append(indices)
        return indices

    def next_batch(self, iterator):
        batch = original["next"](iterator)
        waiting, mark = (vars(iterator).get(n) for n in ("_watched_indices", "_watched"))
        indices = waiting.popleft() if waiting and mark and not in_worker() else None
        if not isinstance(indices, (list, tuple)) or not all(isinstance(i, int) for i in indices):
            return batch
        tensors = [t for t in flat(batch) if t.dim() and len(t) == len(indices)]
        if not tensors:
            return batch
        size, epoch = mark
        inputs = largest(tensors)
        targets = hash_rows([t for t in tensors if t is not inputs]) or [None] * len(indices)
        ids = [((size, i), epoch, target) for i, target in zip(indices, targets)]
        self.drawn.append(ids)
        for key, sample in zip(hash_rows([inputs], tensors), ids):
            known = self.ids.setdefault(key, [])
            if known:
                known[:] = [s for s in known if s[0] != sample[0]]
            known.append(sample)
        return batch

    # ---- backward and step -----------------------------------------------------------------------

    def backward(self, tensors, *args, **kwargs):
        if self.piece is not None or in_worker():
            return original["backward"](tensors, *args, **kwargs)
        if self.pieces and self.is_zero():  # what came before was thrown away
            calls = [c for p in self.pieces for c in p["calls"]]
            self.thrown += sum(len(c["samples"]) for c in calls)
            self.pieces.clear()
        self.zeroed = False
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(c["training"] for c in self.calls):  # the others were an evaluation
            evaluated = [c for c in self.calls if not c["training"]]
            self.evaluated += [s for c in evaluated for s in c["samples"]]
            self.calls = [c for c in self.calls if c["training"]]
        loss = float(sum(t.detach().double().sum() for t in losses))
        self.piece = {"loss": loss, "calls": self.calls, "gradients": {}}
        try:
            return original["backward"](tensors, *args, **kwargs)
        finally:
            self.pieces.append(self.piece)
            self.piece, self.calls = None, []

    def is_zero(self):
        if any(hasattr(p, "placements") for p in self.parameters.values()):
            return self.zeroed  # shards get no gradient before the last micro-batch
        return not any(p.grad is not None and p.grad.any() for p in self.parameters.values())

    def local_gradient(self, name, gradient):  # before DDP averages it
        if self.piece is not None:
            kept = self.piece["gradients"]
            kept[name] = kept.get(name, 0) + sketch(gradient)

    def before_step(self, optimizer, args, kwargs):
        if in_worker() or self.record is not None:  # an optimizer within an optimizer
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self.see_step(optimizer)

        def watched():  # Lightning computes the gradients within the step
            result = closure()
            if self.record is None:
                self.see_step(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def see_step(self, optimizer):
        groups = [(i, p) for i, g in enumerate(optimizer.param_groups) for p in g["params"]]
        self.held.update(id(p) for _, p in groups)
        strange = [p for _, p in groups if id(p) not in self.names]
        group_of = {self.names[id(p)]: i for i, p in groups if id(p) in self.names}
        mine = {n: p for n, p in self.parameters.items() if n in group_of or id(p) not in self.held}
        even.even_gradients([p for _, p in groups], self.even.get("gradient"))
        if self.calls:  # gradients that no backward made
            self.pieces.append({"loss": math.nan, "calls": self.calls, "gradients": {}})
        rank, world = rank_and_world()
        scale = float(getattr(optimizer, "grad_scale", None) or 1)
        gradients = {n: sketch(p.grad) / scale for n, p in mine.items() if p.grad is not None}
        trainable = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.settings = even.settings(optimizer)
        even.even_settings(optimizer, self.even.get("settings"), self.count)
        sharded = any(hasattr(p, "placements") for p in mine.values())
        forgotten = [n for n, p in trainable.items() if id(p) not in self.held]
        frozen = [n for n, p in self.parameters.items() if not p.requires_grad]
        self.record = {"rank": rank, "world": world, "connected": connected(), "sharded": sharded}
        self.record |= {"optimizer": type(optimizer).__name__, "groups": even.settings(optimizer)}
        self.record |= {"group_of": group_of, "strange": len(strange), "forgotten": forgotten}
        self.record |= {"frozen": frozen, "wrapped": dict(self.wrapped), "thrown": self.thrown}
        self.record |= {"weights": {n: sketch(p) for n, p in mine.items()}, "gradients": gradients}
        self.record |= {"buffers": self.buffers, "pieces": self.pieces, "events": self.events}
        self.record |= {"clips": self.clips, "schedulers": self.schedulers}
        self.record |= {"evaluated": self.evaluated, "second_epoch": self.second_epoch is not None}
        self.optimizer, self.mine = optimizer, mine

    def after_step(self, optimizer, args, kwargs):
        if in_worker() or self.record is None or optimizer is not self.optimizer:
            return
        if "settings" in self.even:
            even.even_settings(optimizer, [self.settings], 0)
        after = {n: sketch(p) for n, p in self.mine.items()}
        self.write("step", **self.record, after=after)
        self.record = None
        self.new_step()
        self.count += 1
        if self.last_step():
            self.end()

    def last_step(self):
        """Say whether to end here. The first rank that has seen enough tells the others in a file."""
        if not self.stop:
            path = f"{FOLDER}/stop"
            seconds = time.monotonic() - self.start
            begun = self.count - (self.count if self.second_epoch is None else self.second_epoch)
            enough = (self.count >= 10 and begun >= 3) or (
                self.count >= 3 and seconds > MOST_SECONDS
            )
            if os.path.exists(path):
                with open(path) as file:
                    self.stop = int(file.read() or 0)
            elif enough or self.count >= MOST_STEPS:
                self.stop = self.count + 2  # ranks are less than two steps apart
                with open(f"{path}.{os.getpid()}", "w") as file:
                    file.write(str(self.stop))
                os.replace(file.name, path)
        return self.stop and self.count >= self.stop

    def end(self):
        """End once all ranks are here: the others may still need what this one sends."""
        rank, world = rank_and_world()
        self.file.close()
        open(f"{FOLDER}/{rank}.done", "w").close()
        until = time.monotonic() + 10
        while sum(n.endswith(".done") for n in os.listdir(FOLDER)) < world:
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        import multiprocessing

        for worker in multiprocessing.active_children():
            worker.kill()
        sys.stdout.flush()
        os._exit(0)

    def rest(self):  # an evaluation after the last step
        if self.evaluated and self.file and not self.file.closed:
            self.write("rest", evaluated=self.evaluated)


# ---- tensors -------------------------------------------------------------------------------------


def sketch(tensor):
    """Return numbers that add up as the tensor does: over ranks, shards, pieces, with factors."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    offset, part, total = place(tensor)
    part = part.double().flatten()
    if total <= WIDTH:
        if len(part) == total:
            return part.cpu().numpy().copy()
        whole = part.new_zeros(total)
        whole[offset : offset + len(part)] = part
        return whole.cpu().numpy()
    row, column = divmod(offset, WIDTH)
    rows = -(-(column + len(part)) // WIDTH)
    if column or len(part) % WIDTH:
        part = torch.nn.functional.pad(part, (column, rows * WIDTH - column - len(part)))
    return (signs(row, rows, part.device) @ part.view(rows, WIDTH)).cpu().numpy()


@functools.cache
def signs(row, rows, device):
    """Return 1 or -1 for each of these rows, the same for a row in every process."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 2, (1 << 17,), generator=generator).double() * 2 - 1
    return drawn[(torch.arange(rows) + row) % len(drawn)].to(device)


def place(tensor):
    """Return where this rank's part begins in the tensor, the part, and the numbers of the whole."""
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
    return max(tensors, key=lambda t: t.numel() * t.element_size() // len(t))


def hash_rows(tensors, beside=()):
    """Return a hash of each row; of token ids without their padding, which depends on the batch."""
    hashes = []
    for tensor in tensors:
        rows = tensor.detach().cpu().contiguous()
        alike = [t for t in beside if t is not tensor and t.shape == tensor.shape]
        mask = next((t for t in alike if t.dim() == 2 and not t.is_floating_point()), None)
        if mask is not None and int(mask.min()) >= 0 and int(mask.max()) <= 1:
            rows = [row[kept].numpy() for row, kept in zip(rows, mask.detach().cpu().bool())]
        elif rows.dtype.itemsize:
            rows = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
        hashes.append([hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows])
    return ["".join(row) for row in zip(*hashes)]


def signatures(rows):
    """Return four sums of the numbers of each sample's output, and how many they are."""
    rows = rows.detach().reshape(len(rows), -1)
    rows = rows[:, :: -(-rows.shape[1] // 4096)].double()
    size = rows.shape[1]
    return [(size, *row) for row in (rows @ waves(size, rows.device)).cpu().tolist()]


@functools.cache
def waves(size, device):
    return (torch.arange(4 * size).double() * 0.7).cos().view(size, 4).to(device)


def plain(name):
    return ".".join(part for part in name.split(".") if part not in PREFIXES)


def in_worker():  # of a DataLoader
    return torch.utils.data.get_worker_info() is not None


def connected():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_and_world():
    if connected():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


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
    module.__call__ = lambda self, *args, **kwargs: watch.call(self, *args, **kwargs)
    dataloader.DataLoader.__iter__ = lambda self: watch.start_epoch(self)
    base.__next__ = lambda self: watch.next_batch(self)
    base._next_index = lambda self: watch.next_index(self)
    torch.autograd.backward = lambda *args, **kwargs: watch.backward(*args, **kwargs)
    optimizer.register_optimizer_step_pre_hook(watch.before_step)
    optimizer.register_optimizer_step_post_hook(watch.after_step)
    atexit.register(watch.rest)
    os.register_at_fork(after_in_child=watch.reset)

    def follow(owner, name, then):
        function = getattr(owner, name)

        def followed(*args, **kwargs):
            result = function(*args, **kwargs)
            then(args, kwargs, result)
            return result

        setattr(owner, name, followed)

    def clipped(args, kwargs, norm):
        limit = kwargs.get("max_norm", args[1] if len(args) > 1 else math.nan)
        watch.events.append("clip")
        watch.clips.append((float(norm), float(limit)))

    def scheduled(args, kwargs, result):
        watch.schedulers += 1

    def zeroed(args, kwargs, result):
        watch.zeroed = True

    follow(torch.nn.utils, "clip_grad_norm_", clipped)
    follow(torch.optim.Optimizer, "zero_grad", zeroed)
    follow(module, "zero_grad", zeroed)
    follow(lr_scheduler.LRScheduler, "step", scheduled)
    for name in ("DistributedDataParallel", "DataParallel"):
        made = lambda *_, name=name: watch.wrapped.setdefault(name, False)  # noqa: E731
        follow(getattr(torch.nn.parallel, name), "__init__", made)
    follow(torch, "compile", lambda *_: watch.wrapped.update(compile=True))
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        follow(owner, "all_reduce", lambda *_: watch.events.append("all_reduce"))
    even.install(watch.even)


class Finder:
    """Install the watcher when the program imports torch."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            install()

        spec.loader.exec_module = execute_and_install
        return spec


def other_sitecustomize():
    """Import the sitecustomize that this one hides, if the environment has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec(
        "sitecustomize", [p for p in sys.path if os.path.abspath(p) != here]
    )
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if FOLDER:
    sys.meta_path.insert(0, Finder())
    other_sitecustomize()
