"""The compatibility table of the documentation, from a run of its tests: python -m tests.integration.compatibility."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.wrappers import WRAPPERS

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"
#: The page that shows what works, between its markers.
PAGE = DOCS / "compatibility.md"
MARKERS = "<!-- table -->", "<!-- end -->"

#: How tests call a wrapper in their ids → what the page calls it.
COLUMNS = {name: f"`{name.title().replace('-', '')}`" for name in WRAPPERS if name != "whitened-rank"}

#: Section → situation → the tests in which every wrapper is held against a reference, or refused. A test is a function,
#: or those of its cases whose ids begin so.
SECTIONS: dict[str, dict[str, list[str]]] = {
    "Every optimizer of PyTorch's own database, in configurations that the wrappers share out": {
        "steps": ["test_contract.py::test_steps_are_those_by_hand"],
        "learning rate 0 changes no bit": ["test_contract.py::test_zero_learning_rate_changes_no_bit"],
        "every scheduler that it lists": ["test_contract.py::test_schedulers_are_those_of_the_optimizer_within"],
        "step hooks": ["test_contract.py::test_step_hooks_fire_once"],
        "`add_param_group`": ["test_contract.py::test_added_groups_train_as_those_that_were_there"],
        "`GradScaler` skips infinite gradients": [
            "test_contract.py::test_grad_scaler_skips_infinite_gradients_and_is_no_scale_otherwise"
        ],
        "save and resume (`weights_only=True`), deepcopy, pickle": [
            "test_contract.py::test_checkpoint_copy_and_pickle_go_on_bit_for_bit"
        ],
        "`torch.distributed.checkpoint`, by names of parameters, nested and flat": [
            "test_contract.py::test_distributed_checkpoint_by_parameter_names_goes_on_bit_for_bit"
        ],
        "detached": ["test_contract.py::test_detached_it_is_the_optimizer_within"],
        "LBFGS": ["test_contract.py::test_lbfgs_is_refused"],
        "sparse gradients": ["test_sparse_gradients.py::test_sparse_gradients_step_as_dense_ones"],
    },
    "PyTorch's module database, and Opacus": {
        "outputs and input gradients untouched": [
            "test_module_database.py::test_outputs_and_input_gradients_are_untouched",
        ],
        "evaluation untouched, on the fast path of transformers too": [
            "test_module_database.py::test_evaluation_is_untouched_on_torchs_fast_path_too"
        ],
        "equals Opacus's per-sample gradients, reweighted": ["test_opacus.py::test_samples_are_rows"],
    },
    "Training loops, against the plain loop": {
        "plain": ["test_loops.py::test_plain_loop_with_averages"],
        "gradient accumulation and clipping": [
            "test_loops.py::test_gradient_accumulation", "test_loops.py::test_gradient_clipping"
        ],
        "autocast to float16 (with `GradScaler`) and bfloat16": [
            "test_loops.py::test_float16_autocast_with_grad_scaler", "test_loops.py::test_bfloat16_autocast"
        ],
        "averages of weights (EMA)": ["test_loops.py::test_plain_loop_with_averages"],
        "anomaly detection, frozen layers": ["test_loops.py::test_anomaly_detection_and_frozen_backbone"],
        "activation checkpointing, both modes": ["test_loops.py::test_activation_checkpointing"],
        "`torch.compile` of the model": [
            "test_compile.py::test_compiled_model",
            "test_compile.py::test_the_model_is_one_graph_and_steps_are_those_of_eager_mode",
        ],
        "`torch.compile` of the whole step": ["test_compile.py::test_compiled_step"],
        "no wait for the device but at measurements": [
            "test_waits.py::test_step_waits_for_nothing_but_a_measurement"
        ],
        "CUDA graph of the backward pass": ["test_cuda_graphs.py::test_captured_backward_and_eager_step"],
        "CUDA graph of the whole step": [
            "test_cuda_graphs.py::test_captured_step", "test_cuda_graphs.py::test_capture_of_what_remembers_is_refused"
        ],
    },
    "Several processes, against one on the joined batch": {
        "DDP, static graph and `no_sync` too": [
            "test_distributed_loops.py::test_ddp", "test_distributed_loops.py::test_ddp_no_sync"
        ],
        "FSDP2 (`fully_shard`), sharded save and load too": [
            "test_fsdp.py::test_fsdp2", "test_fsdp.py::test_fsdp2_resumes_from_a_sharded_checkpoint"
        ],
        "tensor parallelism (`parallelize_module`)": [
            "test_tensor_parallel.py::test_tensor_parallel_processes_are_one_that_leaves_these_layers_alone_where_rows_count"
        ],
        "tensor parallelism, save and load by each process": [
            "test_tensor_parallel.py::test_tensor_parallel_resumes_from_what_processes_have_saved_each_and_together"
        ],
        "FSDP1": ["test_fsdp.py::test_fsdp1", "test_fsdp.py::test_fsdp1_is_refused_where_rows_are_needed"],
    },
    "Trainers and models of others, against the plain loop": {
        "Lightning and Accelerate: a schedule, resuming, accumulation and clipping, bfloat16": [
            f"test_trainers.py::test_{test}[{trainer}"
            for test in ("trained_with_a_schedule", "resumed", "accumulation_and_clipping", "bfloat16")
            for trainer in ("lightning", "accelerate")
        ],
        "Accelerate skips a step in float16": ["test_trainers.py::test_accelerate_float16_skips_a_step"],
        "transformers: a schedule, resuming, accumulation and clipping, BERT, GPT-2": [
            *(
                f"test_trainers.py::test_{test}[transformers"
                for test in ("trained_with_a_schedule", "resumed", "accumulation_and_clipping")
            ),
            "test_transformers.py::test_transformers_model_in_its_trainer",
        ],
        "timm's resnet18 and vit_tiny": [
            "test_timm.py::test_timm_trains_as_by_hand", "test_timm.py::test_timm_trains_alike_in_every_gauge"
        ],
    },
    "Faults": {
        "killed at a random moment, and again": [
            "test_killed.py::test_run_killed_at_a_random_moment_and_again_resumes_bit_for_bit"
        ],
        "one of two processes dies": ["test_killed.py::test_death_of_one_of_two_processes_leaves_a_whole_checkpoint"],
        "NaN loss under `GradScaler`": [
            "test_faults.py::test_poisoned_batch_under_grad_scaler_is_as_if_it_had_not_been"
        ],
        "state that torch refuses changes nothing": [
            "test_damaged_checkpoints.py::test_state_that_torch_refuses_changes_nothing"
        ],
        "damaged memory of the wrapper is refused whole": [
            "test_damaged_checkpoints.py::test_damaged_memory_of_the_wrapper_is_refused"
        ],
        "state of another wrapper is refused whole": [
            "test_damaged_checkpoints.py::test_state_of_another_wrapper_is_refused"
        ],
    },
    "Random networks": {
        "outside `step()` the weights are the user's": [
            "test_contract.py::test_outside_the_step_weights_and_outputs_are_the_models"
        ],
        "an exception before the inner optimizer has stepped restores weights and gradients": [
            "test_contract.py::test_exception_within_the_step_restores_weights_and_gradients"
        ],
        "an exception later restores gradients, and the weights that are mapped": [
            "test_contract.py::test_exception_half_way_restores_gradients_and_the_weights_that_are_mapped"
        ],
        "NaN and inf travel": ["test_contract.py::test_rows_that_are_not_finite_show_in_the_gradients"],
        "a scaled loss gives scaled gradients, bit for bit": [
            "test_contract.py::test_scaled_loss_gives_scaled_gradients_bit_for_bit"
        ],
    },
}  # fmt: skip


#: Test that a wrapper is refused → the heading on the page that says why.
REASONS = {
    "test_contract.py::test_lbfgs_is_refused": "lbfgs",
    "test_cuda_graphs.py::test_capture_of_what_remembers_is_refused": "cuda-graphs",
    "test_fsdp.py::test_fsdp1_is_refused_where_rows_are_needed": "sharded-and-flattened-weights",
}


class Recorder:
    """A plugin that notes how every test ended: node id → passed, failed or skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for every phase of every test."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = report.outcome


def marks(functions: Iterable[str], outcomes: Mapping[str, str]) -> list[str]:
    """Of every wrapper: works, is refused and why, has a test that has not run, or – where there is none.

    A test is of the wrapper that its id names first.
    """
    beginnings = tuple(each if "[" in each else f"{each}[" for each in functions)
    known: dict[str, dict[str, str]] = {name: {} for name in COLUMNS}
    for test, outcome in outcomes.items():
        path, _, parameters = test.rstrip("]").partition("[")
        wrapper = re.search(rf"(?:^|-)({'|'.join(COLUMNS)})(?:-|$)", parameters)
        name = f"{Path(path).name}[{parameters}"
        if wrapper and name.startswith(beginnings):
            known[wrapper[1]][name] = outcome
    if not any(known.values()):
        raise LookupError(f"no test of {functions} has run; install the extra `integration`.")
    found = []
    for tests in known.values():
        passed = {test.partition("[")[0] for test, outcome in tests.items() if outcome == "passed"}
        if passed and passed <= REASONS.keys():
            found.append(f"[refused](#{REASONS[min(passed)]})")
        else:
            found.append("✓" if passed else "not run" if tests else "–")
    return found


def section(title: str, rows: Mapping[str, list[str]], outcomes: Mapping[str, str]) -> str:
    """One section in Markdown: a line for the situations of which the same is known of every wrapper."""
    alike: dict[str, list[str]] = {}
    for situation, functions in rows.items():
        wrappers: dict[str, list[str]] = {}
        for wrapper, mark in zip(COLUMNS.values(), marks(functions, outcomes), strict=True):
            wrappers.setdefault(mark, []).append(wrapper)
        wrappers.pop("–", None)
        named = {
            mark: "all seven" if names == [*COLUMNS.values()] else ", ".join(names) for mark, names in wrappers.items()
        }
        whom = ", ".join(f"{mark} with {names}" for mark, names in named.items())
        alike.setdefault(whom, []).append(situation)
    return "\n".join([f"### {title}", "", *(f"- {whom}: {'; '.join(each)}." for whom, each in alike.items())])


def write(outcomes: Mapping[str, str]) -> None:
    before, _, rest = PAGE.read_text().partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    tables = "\n\n".join(section(title, rows, outcomes) for title, rows in SECTIONS.items())
    PAGE.write_text(f"{before}{MARKERS[0]}\n\n{tables}\n\n{MARKERS[1]}{after}")


def main() -> int:
    """Run the tests, and fill the page if none failed."""
    modules = sorted(
        {test.partition("::")[0] for rows in SECTIONS.values() for tests in rows.values() for test in tests}
    )
    recorder = Recorder()
    status = pytest.main(["-q", *(str(FOLDER / module) for module in modules)], plugins=[recorder])
    if status == pytest.ExitCode.OK:
        write(recorder.outcomes)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
