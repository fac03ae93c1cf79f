"""Data sets: what is loaded, its hash, and missing ones say how to get them."""

import hashlib

import pytest
import torch
from torchvision.io import write_jpeg

from benchmarks import data
from benchmarks.data import load

PASSAGE = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 9


@pytest.fixture
def image_tree(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 3), ("test", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = torch.randint(256, (3, 8, 8), generator=generator, dtype=torch.uint8)
                write_jpeg(image, str(folder / f"{number}.jpg"), quality=95)
    return tmp_path / "images"


def test_pixels_are_between_zero_and_one(image_tree):
    digits, images = load("digits").to("cpu", torch.float64), load(f"imagefolder:{image_tree}")
    assert (digits.train_inputs.shape, digits.test_inputs.shape, digits.classes) == ((1438, 64), (359, 64), 10)
    assert (digits.train_inputs.min(), digits.train_inputs.max(), digits.train_inputs.dtype) == (0, 1, torch.float64)
    assert images.train_inputs.dtype == torch.uint8
    assert torch.equal(images.to("cpu", torch.float32).train_inputs, images.train_inputs.float() / 255)


def test_image_folder_is_decoded_class_by_class_and_of_one_size(image_tree):
    data = load(f"imagefolder:{image_tree}")
    assert data.train_inputs.shape == (6, 3 * 8 * 8)
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 0, 1, 1]
    write_jpeg(torch.zeros(3, 4, 4, dtype=torch.uint8), str(image_tree / "train" / "cat" / "9.jpg"))
    with pytest.raises(ValueError, match=r"9\.jpg has shape \(3, 4, 4\)"):
        load(f"imagefolder:{image_tree}")


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


def test_text_with_a_known_hash_is_checked_and_fetched_if_asked(tmp_path, monkeypatch):
    path, source = tmp_path / "data" / "tinyshakespeare.txt", tmp_path / "source"
    source.write_bytes(PASSAGE)
    monkeypatch.setattr(data, "URL", source.as_uri())
    monkeypatch.setattr(data, "SHA256", hashlib.sha256(PASSAGE).hexdigest())
    with pytest.raises(FileNotFoundError, match="add --download to fetch it from file:"):
        data.load_text(str(path))
    text = data.load_text(str(path), download=True)
    assert len(text.train) + len(text.validation) + len(text.test) == len(PASSAGE)
    assert data.load_text(str(path)).vocabulary == text.vocabulary
    path.write_bytes(PASSAGE[1:])
    with pytest.raises(ValueError, match=r"tinyshakespeare\.txt has the SHA-256 .*; delete it and fetch it"):
        data.load_text(str(path))
