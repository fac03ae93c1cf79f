"""Data sets as rows on one device, decoded once and shuffled by index; and texts. All have hashes."""

import hashlib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples import gpt


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
        failed = f"cannot be fetched ({error})" if download else "is not in ./data; add --download to fetch it"
        raise FileNotFoundError(f"CIFAR-10 {failed}, or pass --data imagefolder:PATH for a tree of images.") from error

    inputs, tests = (torch.from_numpy(part.data).permute(0, 3, 1, 2).flatten(1) for part in (train, test))
    return Dataset(inputs, torch.tensor(train.targets), tests, torch.tensor(test.targets))


def imagefolder(argument: str, download: bool) -> Dataset:
    """A tree PATH/train/<class>/*, PATH/test/<class>/* of images of one size, as torchvision's ImageFolder has it."""
    from rich.progress import track
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image

    parts = list[Any]()
    for part in ("train", "test"):
        files = ImageFolder(str(Path(argument) / part), loader=lambda path: decode_image(path, ImageReadMode.RGB))
        images, labels = zip(*track(files, description=f"decoding {part}"), strict=True)
        for (path, _), image in zip(files.samples, images, strict=True):
            if image.shape != images[0].shape:
                raise ValueError(f"{path} has shape {tuple(image.shape)}, unlike the first; resize them alike first.")
        parts += [torch.stack(images).flatten(1), torch.tensor(labels)]
    return Dataset(*parts)


#: Name → loader; what follows a colon in --data is handed to it.
DATA: dict[str, Callable[[str, bool], Dataset]] = {each.__name__: each for each in (digits, cifar10, imagefolder)}


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


#: Where tinyshakespeare is to be had, and its SHA-256.
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def load_text(name: str, download: bool = False) -> gpt.Text:
    """Load a text by its --data argument; tinyshakespeare.txt is checked by its hash, and downloaded if asked."""
    path = Path(name)
    if path.name == "tinyshakespeare.txt":
        if not path.exists():
            if not download:
                raise FileNotFoundError(f"--data {name} is not there; add --download to fetch it from {URL}.")
            path.parent.mkdir(parents=True, exist_ok=True)
            urllib.request.urlretrieve(URL, path)
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
            raise ValueError(f"{name} has the SHA-256 {found}, not {SHA256}; delete it and fetch it from {URL}.")
    return gpt.load(name)
