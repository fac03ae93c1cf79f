"""A GPT of a million parameters on the characters of a text: AdamW wrapped or not, norms kept, exchanged or left out.

    pip install '.[bench]'
    python -m examples.char_lm --preset small --steps 200 --optimizer whitened

It trains on a text that Python ships; `--data FILE` takes your own. Stop it whenever you like: the same command goes on
from its checkpoint, and ends with the same weights bit for bit.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adiv_optim import (
    BatchIdeal,
    Disproportional,
    GradientOnly,
    InputScaled,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
)

from .arguments import positive
from .gpt import DEFAULT, GPT, NORMS, PRESETS, Preset, Text, all_windows, load, next_character_loss, rate_factor

#: What is put around the AdamW: (AdamW, model, an input) → optimizer. All of the library's part in this program.
OPTIMIZERS: dict[str, Callable[[AdamW, GPT, Tensor], Optimizer]] = {
    "adamw": lambda inner, model, tokens: inner,
    "proportional": lambda inner, model, tokens: GradientOnly(inner, model, Proportional()),
    "disproportional": lambda inner, model, tokens: GradientOnly(inner, model, Disproportional()),
    "batch-ideal": lambda inner, model, tokens: GradientOnly(inner, model, BatchIdeal(damping=3.0, per_sample=False)),
    "unit-consistent": lambda inner, model, tokens: UnitConsistent(inner, model, example_input=tokens),
    "whitened": lambda inner, model, tokens: Whitened(inner, model, rank=16),
    "preconditioned": lambda inner, model, tokens: Preconditioned(inner, model),
    "input-scaled": lambda inner, model, tokens: InputScaled(inner, model, hold=True),
}


def train(options: argparse.Namespace, text: Text, tick: Callable[[int, float], None]) -> GPT:
    """Train to the last step, from the checkpoint if there is one.

    Args:
        options: the command line's.
        text: what to train on.
        tick: called after every step with its number and its loss.
    """
    torch.manual_seed(options.seed)
    size = PRESETS[options.preset]
    model = GPT(size, len(text.vocabulary), options.norm).to(options.device)
    windows = torch.Generator().manual_seed(options.seed)
    inner = AdamW(model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
    optimizer = OPTIMIZERS[options.optimizer](inner, model, text.train[None, : size.context])
    schedule = LambdaLR(optimizer, lambda done: rate_factor(min(done + 1, options.steps), options.steps))
    step = 0
    if options.checkpoint.exists():
        saved = load_checkpoint(options)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        windows.set_state(saved["windows"].cpu())
        step = saved["step"]
    while step < options.steps:
        optimizer.zero_grad()
        loss = next_character_loss(model, draw(text.train, size, windows))
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step % options.save_every == 0 or step == options.steps:
            save(
                {
                    "run": identity(options),
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "windows": windows.get_state(),
                },
                options.checkpoint,
            )
        tick(step, loss.item())
    return model


def draw(text: Tensor, size: Preset, generator: torch.Generator) -> Tensor:
    """A batch of windows at random places, (batch, context + 1)."""
    starts = torch.randint(len(text) - size.context, (size.batch_size, 1), generator=generator)
    return text[starts.to(text.device) + torch.arange(size.context + 1, device=text.device)]


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint must have in common with a run that goes on from it."""
    names = ("data", "preset", "optimizer", "norm", "lr", "weight_decay", "steps", "seed")
    return {name: getattr(options, name) for name in names}


def load_checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Return the checkpoint of the run that these options name."""
    try:
        saved: dict[str, Any] = torch.load(options.checkpoint, map_location=options.device, weights_only=True)
        run = saved["run"]
    except (OSError, EOFError, RuntimeError, LookupError, TypeError, UnpicklingError) as error:
        raise SystemExit(f"--checkpoint {options.checkpoint}: no checkpoint of this program ({error!r}).") from error
    check(run, identity(options), options.checkpoint)
    return saved


def check(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Refuse the checkpoint of another run, by the first difference."""
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise SystemExit(
                f"{path} is of a run with {name} {saved.get(name)!r}, this one has {value!r}: "
                "give it another --checkpoint, or delete that one."
            )


def save(state: dict[str, Any], path: Path) -> None:
    """Replace a checkpoint in one move, so that there is a whole one whenever the program dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


@torch.no_grad()
def mean_loss(model: GPT, windows: Tensor, batch_size: int) -> float:
    """Nats per character."""
    parts = windows.split(batch_size)
    return sum(next_character_loss(model, part).item() * len(part) for part in parts) / len(windows)


@torch.no_grad()
def sample(model: GPT, text: Text, length: int, seed: int) -> str:
    """So many characters, each drawn from what the model expects after those before it."""
    context, generator = model.position_embedding.num_embeddings, torch.Generator().manual_seed(seed)
    tokens = text.validation[None, :context]
    for _ in range(length):
        probabilities = model(tokens[:, -context:])[:, -1].softmax(-1).cpu()
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator).to(tokens.device)], 1)
    return "".join(text.vocabulary[token] for token in tokens[0, -length:].tolist())


def rate(text: str) -> float:
    """A positive number of the command line."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m examples.char_lm", description=__doc__.partition("\n")[0])
    found.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    found.add_argument("--data", default=DEFAULT, help=f"a file of text in UTF-8, or {DEFAULT}, which Python ships")
    found.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="and what is around it")
    found.add_argument("--norm", choices=NORMS, default="layernorm", help="before attention, MLP and head")
    found.add_argument("--preset", choices=PRESETS, default="million", help="size of the network and its batches")
    found.add_argument("--lr", type=rate, default=3e-3, help="at its peak; it rises for a twentieth of the steps")
    found.add_argument("--weight-decay", type=float, default=0.0, help="of all parameters")
    found.add_argument("--steps", type=positive, default=1000, help="how many")
    found.add_argument("--seed", type=int, default=0, help="of weights and batches")
    checkpoint = Path("runs") / "char-lm-OPTIMIZER-NORM.pt"
    found.add_argument("--checkpoint", type=Path, default=checkpoint, help="OPTIMIZER and NORM are filled in")
    found.add_argument("--save-every", type=positive, default=100, metavar="STEPS", help="between checkpoints")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found.add_argument("--device", default=device, help="where to train: cpu, cuda, cuda:1, …")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, and write a few lines in the manner of the text."""
    options = parser().parse_args(arguments)
    checkpoint = str(options.checkpoint).replace("OPTIMIZER", options.optimizer).replace("NORM", options.norm)
    options.checkpoint = Path(checkpoint)
    try:
        text = load(options.data).to(options.device)
    except UnicodeDecodeError as error:
        raise SystemExit(f"--data {options.data}: it is no text in UTF-8 ({error}).") from error
    except OSError as error:
        raise SystemExit(str(error)) from error
    except (RuntimeError, AssertionError) as error:  # an assertion is what a build without CUDA raises
        raise SystemExit(f"--device {options.device}: {str(error).splitlines()[0]}") from error
    size = PRESETS[options.preset]
    if len(text.validation) <= size.context:
        raise SystemExit(
            f"--data {options.data}: a tenth of it is {len(text.validation)} characters, "
            f"no window of {size.context + 1}; take a longer text{', or --preset tiny' * (options.preset != 'tiny')}."
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=options.steps)

        def tick(step: int, loss: float) -> None:
            progress.update(task, completed=step, description=f"loss {loss:.3f}")

        model = train(options, text, tick)
    for name, part in (("validation", text.validation), ("test", text.test)):
        print(f"{name} loss: {mean_loss(model, all_windows(part, size), size.batch_size):.4f} nats per character")
    print(sample(model, text, 300, options.seed))


if __name__ == "__main__":
    main()
