"""Samples in tar files: the records are listed once, and each is fetched by its number.

Loader workers would share the position in an open file. So each record is read from a file that is
opened anew.
"""

import io
import tarfile

import numpy as np
from vectors import *


class Tar(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = path
        with tarfile.open(path) as tar:
            places = [(member.size, member.offset_data) for member in tar]
        # An array: a loader worker is a fork, and would copy the memory of a list as it reads it.
        self.places = np.array(places, np.int64)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        size, start = self.places[index]
        with open(self.path, "rb") as file:
            file.seek(start)
            record = np.load(io.BytesIO(file.read(size)))
        return torch.from_numpy(record), int(record.sum() > 0)


def add_options(parser):
    parser.add_argument("--tars", required=True)


def build_datasets(args):
    return Tar(f"{args.tars}/train.tar"), Tar(f"{args.tars}/val.tar")
