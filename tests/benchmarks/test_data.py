"""Data sets: decoded once, cached whole, and missing ones say how to get them."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from torchvision.io import write_jpeg

from benchmarks import data
from benchmarks.data import load

CLASSES = ("cat", "dog")
PASSAGE = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 9


@pytest.fixture
def image_tree(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 3), ("test", 2)):
        for name in CLASSES:
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = torch.randint(256, (3, 8, 8), generator=generator, dtype=torch.uint8)
                write_jpeg(image, str(folder / f"{number}.jpg"), quality=95)
    return tmp_path / "images"


def test_pixels_are_between_zero_and_one():
    digits, fake = load("digits").to("cpu", torch.float64), load("fake")
    assert (digits.train_inputs.shape, digits.test_inputs.shape, digits.classes) == ((1438, 64), (359, 64), 10)
    assert (digits.train_inputs.min(), digits.train_inputs.max(), digits.train_inputs.dtype) == (0, 1, torch.float64)
    assert fake.train_inputs.dtype == torch.uint8
    assert torch.equal(fake.to("cpu", torch.float32).train_inputs, fake.train_inputs.float() / 255)


def test_image_folder_is_decoded_once(image_tree, monkeypatch):
    first = load(f"imagefolder:{image_tree}")
    assert first.train_inputs.shape == (6, 3 * 8 * 8)
    assert first.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert first.test_labels.tolist() == [0, 0, 1, 1]
    monkeypatch.setattr(data, "_decode", None)
    again = load(f"imagefolder:{image_tree}")
    assert all(torch.equal(a, b) for a, b in zip(first[:4], again[:4], strict=True))


def test_interrupted_decoding_leaves_no_cache_and_images_of_two_sizes_are_refused(image_tree):
    write_jpeg(torch.zeros(3, 4, 4, dtype=torch.uint8), str(image_tree / "train" / "cat" / "9.jpg"))
    with pytest.raises(ValueError, match=r"9\.jpg has shape \(3, 4, 4\)"):
        load(f"imagefolder:{image_tree}")
    (image_tree / "train" / "cat" / "9.jpg").write_bytes(b"half an image")
    with pytest.raises(RuntimeError):
        load(f"imagefolder:{image_tree}")
    assert not list((image_tree.parent / "cache").glob("*"))


def test_missing_cifar10_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="add --download"):
        load("cifar10")


def test_hash_is_of_pixels_and_labels_wherever_they_lie(image_tree, tmp_path):
    here = load(f"imagefolder:{image_tree}")
    there = image_tree.rename(tmp_path / "elsewhere")
    assert load(f"imagefolder:{there}").hash == here.hash
    (there / "test" / "dog" / "1.jpg").rename(there / "test" / "cat" / "9.jpg")
    assert load(f"imagefolder:{there}").hash != here.hash
    assert here.to("cpu", torch.float64).hash == here.hash
    assert f"| `{load('digits').hash}` |" in (Path(data.__file__).parent / "README.md").read_text()


def test_text_with_a_known_hash_is_checked_and_fetched_if_asked(tmp_path, monkeypatch):
    path, source = tmp_path / "data" / "tinyshakespeare.txt", tmp_path / "source"
    source.write_bytes(PASSAGE)
    monkeypatch.setitem(data.TEXTS, path.name, (source.as_uri(), hashlib.sha256(PASSAGE).hexdigest()))
    with pytest.raises(FileNotFoundError, match="add --download to fetch it from file:"):
        data.load_text(str(path))
    text = data.load_text(str(path), download=True)
    assert len(text.train) + len(text.validation) + len(text.test) == len(PASSAGE)
    assert data.load_text(str(path)).vocabulary == text.vocabulary
    path.write_bytes(PASSAGE[1:])
    with pytest.raises(ValueError, match=r"tinyshakespeare\.txt has the SHA-256 .*; delete it and fetch it"):
        data.load_text(str(path))


@pytest.mark.parametrize("keeps_its_time", [False, True], ids=["written", "copied"])
def test_replaced_file_is_decoded_again(image_tree, keeps_its_time):
    before = load(f"imagefolder:{image_tree}")
    file = image_tree / "train" / "cat" / "0.jpg"
    stat, other = file.stat(), (image_tree / "train" / "dog" / "0.jpg").read_bytes()
    file.write_bytes(other.ljust(stat.st_size, b"\0"))  # what follows a picture is not read
    if keeps_its_time:
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load(f"imagefolder:{image_tree}")
    assert torch.equal(after.train_inputs[0], before.train_inputs[3])
    assert torch.equal(after.train_inputs[1:], before.train_inputs[1:])
    file.unlink()
    assert torch.equal(load(f"imagefolder:{image_tree}").train_inputs, before.train_inputs[1:])
