"""Data sets as rows on one device: decoded once, cached as uint8, shuffled by index; and texts. All have hashes."""

import hashlib
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from examples import gpt

#: Where decoded data sets are kept between runs.
CACHE = Path(".cache")


class Dataset(NamedTuple):
    """A classification data set, flattened."""

    train_inputs: Tensor  # (n, features)
    train_labels: Tensor  # (n,), int64
    test_inputs: Tensor
    test_labels: Tensor
    hash: str = ""  # of all that as it was loaded; see `load`

    @property
    def features(self) -> int:
        """Numbers per sample."""
        return self.train_inputs.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.train_labels.max()) + 1

    def to(self, device: str, dtype: torch.dtype) -> "Dataset":
        """Return the data set on `device`, inputs as `dtype`: bytes become pixels in [0, 1]."""
        scale = 255 if self.train_inputs.dtype == torch.uint8 else 1
        train, test = (inputs.to(device).to(dtype).div_(scale) for inputs in (self.train_inputs, self.test_inputs))
        return Dataset(train, self.train_labels.to(device), test, self.test_labels.to(device), self.hash)


def digits(argument: str, download: bool) -> Dataset:
    """scikit-learn's 1,797 digits of 8×8 pixels, which ship in its wheel; the last fifth is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = torch.from_numpy(bunch.data) / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order.split([len(order) - len(order) // 5, len(order) // 5])
    return Dataset(inputs[train], labels[train], inputs[test], labels[test])


def cifar10(argument: str, download: bool) -> Dataset:
    """CIFAR-10 by torchvision, from ./data, its archive checked by its MD5; downloaded only if asked."""
    from torchvision.datasets import CIFAR10

    try:
        train, test = (CIFAR10("data", train=part, download=download) for part in (True, False))
    except (RuntimeError, OSError) as error:
        failed = f"it cannot be fetched ({error}): put torchvision's files there"
        raise FileNotFoundError(
            f"CIFAR-10 is not in ./data; {failed if download else 'add --download to fetch it'}, or pass --data "
            "imagefolder:PATH for a tree of image files PATH/train/<class>/ and PATH/test/<class>/."
        ) from error

    def rows(images: np.ndarray) -> Tensor:
        return torch.from_numpy(images).permute(0, 3, 1, 2).flatten(1).contiguous()

    return Dataset(rows(train.data), torch.tensor(train.targets), rows(test.data), torch.tensor(test.targets))


def imagefolder(argument: str, download: bool) -> Dataset:
    """A tree PATH/train/<class>/*, PATH/test/<class>/* of images of one size; decoded once and cached."""
    if not argument:
        raise ValueError("--data imagefolder names no folder; write imagefolder:PATH.")
    root = Path(argument)
    for part in ("train", "test"):
        if not (root / part).is_dir():
            raise FileNotFoundError(
                f"--data imagefolder:{argument}: there is no folder {root / part}. The tree must hold images as "
                f"{root}/train/<class>/<name>.jpg and {root}/test/<class>/<name>.jpg (torchvision's ImageFolder)."
            )
    # Whatever changes with a file is part of the key, so that a tree that has changed is decoded again. A copy may keep
    # the time of its writing, but no copy keeps the time of its change.
    stats = sorted((str(path.relative_to(root)), path.stat()) for path in root.rglob("*.*"))
    files = [f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for name, stat in stats]
    key = hashlib.sha256("\n".join([str(root.resolve()), *files]).encode()).hexdigest()[:16]
    cache = CACHE / f"imagefolder-{key}.pt"
    if not cache.exists():
        parts = {part: _decode(root / part) for part in ("train", "test")}
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(f".{os.getpid()}.partial")
        torch.save(parts, partial)
        partial.replace(cache)
    parts = torch.load(cache, weights_only=True)
    return Dataset(*parts["train"], *parts["test"])


def _decode(folder: Path) -> tuple[Tensor, Tensor]:
    from rich.progress import track
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image

    files = ImageFolder(str(folder), loader=lambda path: decode_image(path, ImageReadMode.RGB))
    images, labels = zip(*track(files, description=f"decoding {folder.name}"), strict=True)
    paths = [path for path, _ in files.samples]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(f"{path} has shape {tuple(image.shape)}, unlike {paths[0]}; resize them alike first.")
    return torch.stack(images).flatten(1), torch.tensor(labels)


def fake(argument: str, download: bool) -> Dataset:
    """Noise in the shape of CIFAR-10, 10,000 training and 1,000 test rows: for timing without files."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (11000, 3072), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (11000,), generator=generator)
    return Dataset(inputs[:10000], labels[:10000], inputs[10000:], labels[10000:])


#: Name → loader; what follows a colon in --data is handed to it.
DATA: dict[str, Callable[[str, bool], Dataset]] = {each.__name__: each for each in (digits, cifar10, imagefolder, fake)}


def load(name: str, download: bool = False) -> Dataset:
    """Load a data set by its --data argument, such as 'digits' or 'imagefolder:PATH'.

    Its hash is of pixels and labels, in order: it says which data a result was made of, wherever they lay.
    """
    kind, _, argument = name.partition(":")
    if kind not in DATA:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(DATA)} (imagefolder as imagefolder:PATH).")
    data = DATA[kind](argument, download)
    found = hashlib.sha256()
    for part in data[:4]:
        found.update(part.contiguous().numpy().tobytes())
    return data._replace(hash=found.hexdigest()[:16])


#: Where tinyshakespeare is to be had, by the name of its file, and the SHA-256 of that.
TEXTS = {
    "tinyshakespeare.txt": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    )
}


def load_text(name: str, download: bool = False) -> gpt.Text:
    """Load a text by its --data argument; one of `TEXTS` is checked by its hash, and downloaded only if asked."""
    path = Path(name)
    if path.name not in TEXTS:
        return gpt.load(name)
    url, wanted = TEXTS[path.name]
    if not path.exists():
        if not download:
            raise FileNotFoundError(f"--data {name} is not there; add --download to fetch it from {url}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        urllib.request.urlretrieve(url, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise ValueError(f"{name} has the SHA-256 {found}, not {wanted}; delete it and fetch it from {url}.")
    return gpt.load(name)
