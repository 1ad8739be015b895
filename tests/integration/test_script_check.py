# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof doctor --script` finds what is wrong with a private training loop, and nothing in right ones.

The loops are those of scripts/private_loops.py, where the defects are planted: what the sentences must say is known.
"""

import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from opacus_memprof.language import in_language
from opacus_memprof.loop_check.records import StepResult
from opacus_memprof.loop_check.script import ScriptVerdict, print_verdict
from tests.warm_python import ENVIRONMENT, interpreter

SCRIPTS = Path(__file__).parent / "scripts"
PARAMETERS = {f"{layer}.{name}" for layer in ("conv", "norm", "head") for name in ("weight", "bias")}


def doctor(*arguments: str, script: str = "private_loops.py") -> subprocess.CompletedProcess[str]:
    command = [*interpreter(), "-m", "opacus_memprof", "doctor", "--script", script, *arguments]
    return subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, env=ENVIRONMENT)


def deviations(out: str) -> dict[str, float]:
    return {name: float(size) for size, name in re.findall(r"^ *(\d\.\de[+-]\d\d)  (\S+)", out, re.MULTILINE)}


def _name_of_case(value: object) -> str | None:
    """Leaves the sentences out of a test's name."""
    return "" if isinstance(value, list) else None


LOOPS = [
    *(("plain", mode) for mode in ("hooks", "ew", "ghost", "flash_clip")),
    *(("memory_manager", mode) for mode in ("hooks", "ghost")),
    *((case, "hooks") for case in ("accumulation", "schedulers", "dropout", "ddp", "per_layer", "adaptive", "poisson")),
    *((case, "hooks") for case in ("augmented", "less_noise_later", "workers", "accelerated", "keyword", "inner_loss")),
    *((case, "hooks") for case in ("learning_rate", "replaced_before", "again", "objects")),
    ("transformed", "ghost"),
    ("micro_batches", "flash_clip"),
    ("empty", "ghost"),
    ("permuted", "functorch"),
]
# What the check does with these loops, it does as with hooks; with the mode, as with the plain loop.
REPEATED = ("memory_manager", "accumulation", "schedulers", "dropout", "ddp", "per_layer", "adaptive", "poisson")
AT_NIGHT = [
    pytest.param(case, mode, marks=pytest.mark.nightly)
    for case, mode in (("plain", "functorch"), *((case, "flash_clip") for case in REPEATED))
]


@pytest.mark.parametrize(("case", "mode"), [*LOOPS, *AT_NIGHT])
def test_a_right_loop_is_exact(case: str, mode: str) -> None:
    if case == "accelerated":
        pytest.importorskip("accelerate")
    ran = doctor(case, mode)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert "DEFECT" not in ran.stdout
    assert "zero_grad dropped" not in ran.stdout
    assert "trained to the end" not in ran.stdout
    assert f"grad_sample_mode='{mode}' trains this script exactly: 2 logical steps" in ran.stdout
    found = deviations(ran.stdout)
    assert len(found) == 6
    assert max(found.values()) < 1e-5
    unchecked = re.findall("^not checked: (.*)", ran.stdout, re.MULTILINE)
    assert len(unchecked) == 1
    assert "losses outside of the model that mix samples" in unchecked[0]
    assert "data that were mixed before it (mixup)" in unchecked[0]


@pytest.mark.parametrize("mode", ["hooks", pytest.param("functorch", marks=pytest.mark.nightly), "ghost"])
def test_without_make_private_the_sampling_is_unknown(mode: str) -> None:
    ran = doctor("by_hand", mode)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert max(deviations(ran.stdout).values()) < 1e-5
    assert re.search(
        rf"^grad_sample_mode='{mode}' clips exactly in 2 logical steps, .*; "
        r"not checked: whether the batches are drawn as the accountant assumes\.$",
        ran.stdout,
        re.MULTILINE,
    )


@pytest.mark.parametrize("mode", ["hooks", "flash_clip"])
def test_rounding_of_autocast_is_no_defect(mode: str) -> None:
    ran = doctor("autocast", mode)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    assert max(deviations(ran.stdout).values()) < 5e-2


def test_a_model_of_transformers_is_exact() -> None:
    pytest.importorskip("transformers")
    ran = doctor("gpt2", "flash_clip")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "trains this script exactly: 2 logical steps, 8 samples" in ran.stdout


def test_what_the_steps_were() -> None:
    """BatchMemoryManager with three samples at most."""
    out = doctor("memory_manager", "hooks").stdout
    batches = [tuple(map(int, each)) for each in re.findall(r"step \d: (\d) physical batches, (\d+) samples", out)]
    assert len(batches) == 2
    assert all(parts == -(-samples // 3) for parts, samples in batches)
    noise = [float(each) for each in re.findall(r"noise (\d\.\d+) times the requested", out)]
    assert noise == pytest.approx([1.0, 1.0], abs=6 / (2 * 276) ** 0.5)  # 276 numbers


@pytest.mark.parametrize(
    ("case", "mode", "sentences"),
    [
        # Opacus' issue 820 and its relatives
        (
            "other_model",
            "hooks",
            [
                "Opacus stops with ValueError: Module parameters are different than optimizer Parameters. The "
                "optimizer holds 6 parameters, and 6 of them are not parameters of the private model: [8, 3, 3, 3] (as "
                "conv.weight)",
                "make the optimizer from the parameters of the model that is trained",
            ],
        ),
        ("copied", "hooks", ["The model that runs is a copy of the private one"]),
        (
            "foreign",
            "hooks",
            ["The optimizer holds 6 parameters, and 6 of them are not parameters of the private model: [8, 3, 3, 3]"],
        ),
        ("foreign", "ghost", ["6 of them are not parameters of the private model"]),
        (
            "replaced_head",
            "hooks",
            ["head.weight, head.bias can be trained, but the private optimizer does not hold them"],
        ),
        ("silent_copy", "hooks", ["conv.weight, conv.bias can be trained, but the private optimizer does not"]),
        # 389
        (
            "own_optimizer",
            "hooks",
            [
                "The script steps an optimizer that the private optimizer was made from (SGD), not the private one: "
                "conv.weight and 5 more parameters",
                "neither clipped nor noised",
            ],
        ),
        ("new_optimizer", "flash_clip", ["The script steps an optimizer of its own (Adam), not the private one"]),
        # 683
        (
            "accumulation",
            "ghost",
            [
                "physical batch 1 counts 0.00 times, physical batch 2 counts 1.00 times, instead of once each",
                "Each backward drops the gradients of the batches before, as ghost clipping does in Opacus",
                "The noised sum is divided by 8, not by 16",
                "the update is 2 times as large",
            ],
        ),
        # 692
        (
            "old_accumulation",
            "ghost",
            [
                "physical batch 1 counts 0.00 times, physical batch 2 counts 0.00 times, physical batch 3 counts 2.00 "
                "times, instead of once each",
                "The optimizer loses the batches of skipped steps",
            ],
        ),
        # 377
        (
            "scaled",
            "hooks",
            [
                "GradScaler multiplies the loss by 65536 before backward",
                "100% of the samples are clipped to 1000, and 0% would be without the factor",
            ],
        ),
        ("scaled_all", "hooks", ["100% of the samples are clipped to 1e-09, and 100% would be without the factor"]),
        ("less_noise", "hooks", ["counts a noise_multiplier of 1, but the optimizer's is 0.1: epsilon is too small"]),
        ("other_rate", "flash_clip", ["drawn with a probability of 0.5, but the accountant counts 0.125"]),
        # samples that are not those of the accountant
        *(
            (case, mode, ["do not come from the loader that make_private returned: epsilon does not hold"])
            for case, mode in (
                ("original_loader", "hooks"),
                ("original_loader", "ghost"),
                ("original_loader_augmented", "flash_clip"),
                ("zipped", "hooks"),
                ("without_loader", "hooks"),
            )
        ),
        *(
            (case, "hooks", ["several steps with the same batch, but epsilon is that of a new one in each step."])
            for case in ("fixed_batch", "fixed_in_loop", "fixed_augmented")
        ),
        (
            "schedulers",
            "ghost",
            [
                "does not clip this loop exactly: the clipped sum of 8 samples in 1 physical batch is 1.",
                "The samples are clipped to 2, the model's bound, but the noise is that of the bound 1 of the "
                "optimizer",
            ],
        ),
        ("per_layer_scheduler", "hooks", ["The parameters are clipped to the bounds that the optimizer was made with"]),
        ("mixing", "hooks", ["The samples of a batch are not processed separately", "output in conv (Conv2d) by"]),
        (
            "no_noise",
            "hooks",
            [
                "No noise is added to head.bias, although the optimizer asks for a standard deviation of 2.",
                "The noise does not have the requested standard deviation, 2 (noise_multiplier times bound): in "
                "conv.weight it is 0.4",
            ],
        ),
        ("same_noise", "hooks", ["The noise of a step is the same as that of the step before"]),
        ("wrong_divisor", "hooks", ["divided by 2.667, not by 8", "the update is 3 times as large"]),
        ("other_update", "hooks", ["Something else changes conv.weight in the step of SGD"]),
        ("permuted", "hooks", ["1 of 6 parameters", "(conv.weight). Exact for this model and batch: flash_clip"]),
        ("permuted", "ghost", ["finds wrong gradient norms", "Exact for this model and batch: flash_clip, functorch."]),
        (
            "valid_labels",
            "hooks",
            ["The loss that the model computes is", "but the mean of its samples' losses is", "over all valid labels"],
        ),
        (
            "noiseless",
            "hooks",
            ["The script replaces the gradients of conv.weight, norm.bias by others without noise before the update."],
        ),
        (
            "updated_by_hand",
            "hooks",
            [
                "The script changes conv.weight, conv.bias, norm.weight, norm.bias and 2 more between backward passes "
                "without a step of the private optimizer"
            ],
        ),
        (
            "two_reductions",
            "hooks",
            [
                "The noised sum is divided by 1, not by 8",
                "the update is 8 times as large as with the mean over the samples. The model has "
                "loss_reduction='mean', but the optimizer 'sum'.",
            ],
        ),
        (
            "same_samples",
            "hooks",
            ["several times on the same samples before a step", "call backward() once."],
        ),
        ("plain_criterion", "ghost", ["The loss is not that of the criterion which make_private returned"]),
        (
            "penalty",
            "hooks",
            ["A part of the loss comes from conv.weight directly", "optimizer's weight_decay."],
        ),
        (
            "with_replacement",
            "hooks",
            ["RandomSampler draws with replacement: a batch can have a sample several"],
        ),
        # refusals of flash_clip, before the first step and after it
        ("unused", "flash_clip", ["The training is refused: no gradient reached spare.weight, spare.bias"]),
        ("same_noise", "flash_clip", ["The training is refused: the random numbers of this step would be those of an"]),
        ("sum_loss", "hooks", ["a sum over the samples, but loss_reduction='mean' was declared"]),
        # errors of Opacus
        ("without_zero_grad", "hooks", ["The gradients of the last step are still there: call optimizer.zero_grad()"]),
        ("zero_grad_of_model", "hooks", ["no optimizer.zero_grad() between them", "The model's zero_grad() does not"]),
        ("old_head", "hooks", ["2 of them are not parameters of the private model: [4, 8] (as head.weight)"]),
        (
            "new_head",
            "hooks",
            ["therefore without Opacus' hooks: head.weight, head.bias. Make the model private"],
        ),
        ("evaluating", "hooks", ["The forward ran in eval mode, in which Opacus' hooks keep nothing: call train()"]),
        ("part_of_model", "hooks", ["norm.weight, norm.bias, head.weight, head.bias can be trained, but the private"]),
        ("lbfgs", "hooks", ["one that evaluates the loss several times in a step, such as LBFGS, cannot be private."]),
        (
            "unused",
            "hooks",
            ["Per sample gradient is not initialized", "took part in the loss: spare.weight, spare.bias."],
        ),
        ("unused", "ghost", ["'_norm_sample'", "no layer with them took part in the loss: spare.weight, spare.bias."]),
        (
            "tokens",
            "hooks",
            [
                "stack expects each tensor to be equal size",
                "Most parameters have 8 (conv.weight, conv.bias), but head.weight, head.bias: 288.",
            ],
        ),
        ("tokens", "ghost", ["Most parameters have 8 (conv.weight, conv.bias), but head.weight, head.bias: 288."]),
        ("poisson_accumulation", "hooks", ["put the loader into a BatchMemoryManager"]),
    ],
    ids=_name_of_case,
)
def test_a_defect_is_found_and_explained(case: str, mode: str, sentences: list[str]) -> None:
    ran = doctor(case, mode)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "neither the training nor the privacy that is accounted for can be relied on." in ran.stdout
    for sentence in sentences:
        assert any(sentence in defect for defect in re.findall("^DEFECT: .*", ran.stdout, re.MULTILINE)), ran.stdout


@pytest.mark.parametrize("case", ["own_optimizer_with_poisson", "part_of_model", "old_head"])
def test_a_consequence_is_no_second_defect(case: str) -> None:
    """Opacus stops because gradients stay that the optimizer does not clear, or because there are none."""
    assert doctor(case, "hooks").stdout.count("DEFECT") == 1


def test_the_samples_clipped_are_those_of_the_scaled_loss() -> None:
    """Without GradScaler, none of the eight samples has a norm above the bound of 1000."""
    clipped = re.findall(r"8 samples, (\d) clipped", doctor("scaled", "hooks").stdout)
    assert clipped[0] == "8"


def test_a_factor_of_the_script_is_a_note() -> None:
    ran = doctor("divided_loss", "hooks")
    assert ran.returncode == 0
    assert "note: The script multiplies the loss by 0.5 before backward" in ran.stdout


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        ("interrupted", ["private_loops.py was interrupted after 1 logical step.", "a second logical step"]),
        ("raises", ["(the data are gone) after 1 logical step.", "a second logical step: it was not reached."]),
        ("one_step", ["private_loops.py ended after 1 logical step.", "a second logical step: it was not reached."]),
        ("random_loss", ["not checked: the clipped sum: the model returns one loss for the batch and draws"]),
        ("no_multiplier", ["not checked: noise: noise_multiplier is 0, so that the training is not private."]),
        ("late_scheduler", ["not checked: schedulers of noise or clipping: they did not act"]),
        ("flattened", ["not checked: the clipped sum: an output has the shape [30] for 8 samples"]),
        ("changed_outside", ["not checked: what has changed head.bias outside of the optimizer's step"]),
        ("uncounted", ["not checked: epsilon: no accountant of Opacus has counted the step."]),
        ("other_loader", ["the script trains on others than those of its loader."]),
        ("zipped_and_changed", ["the script draws from other loaders, too, and changes the batches"]),
        (
            "multiplicity",
            [
                "not checked: the clipped sum: the script changes the per-sample gradients between backward",
                "whether each sample is clipped once: the model got 16 samples where the loader had drawn 8: where",
            ],
        ),
        ("gradients_halved", ["not checked: what has changed the gradients of conv.weight after noise was added"]),
        ("clipped_after_noise", ["not checked: what has changed the gradients of conv.weight, conv.bias, norm.weight"]),
        ("plateau", ["not checked: learning rates of ReduceLROnPlateau: they follow the number that it is given"]),
        ("moving_center", ["not checked: what has changed center outside of the optimizer's step"]),
        ("generated", ["there are more steps than batches, and some are on inputs that are in no batch."]),
        (
            "kept_term",
            ["No defect was found", "do not explain the gradients of conv.weight, conv.bias"],
        ),
        ("outer_head", ["not checked: what SGD updates, which is not a private optimizer (2 parameters that are not"]),
        ("compiled", ["not checked: compiled code: torch.compile is off during the check."]),
    ],
    ids=_name_of_case,
)
def test_what_was_not_checked_is_said(case: str, lines: list[str]) -> None:
    ran = doctor(case, "hooks")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    for line in lines:
        assert line in ran.stdout
    assert "exactly:" not in ran.stdout


@pytest.mark.parametrize(
    ("language", "parts"),
    [
        ("en", "not checked: noise; what has changed a.weight, b.bias outside of the optimizer's step."),
        ("zh", "没有检查：加噪; 在优化器的步之外改变了 a.weight, b.bias 的是什么。"),
    ],
)
def test_the_last_line_names_all_that_was_not_checked(language: str, parts: str) -> None:
    unchecked = [
        ("noise", "the clipped sum without it is not known."),
        ("what has changed a.weight, b.bias outside of the optimizer's step", "values that depend on data."),
    ]
    verdict = ScriptVerdict("hooks", [StepResult(1, 8, errors={"a.weight": 0.0})], [], unchecked, [], None)
    with in_language(language), (console := Console(width=200)).capture() as printed:
        print_verdict(verdict, console)
    assert printed.get().rstrip().endswith(parts)


def test_a_defect_before_the_script_ends_counts() -> None:
    ran = doctor("interrupted_accumulation", "ghost")
    assert ran.returncode == 1
    assert "physical batch 1 counts 0.00 times" in ran.stdout
    assert "private_loops.py was interrupted after 1 logical step." in ran.stdout


@pytest.mark.parametrize(
    ("case", "mode", "sentence"),
    [
        ("not_private", "hooks", "(the data are gone) before it made a model private: there is nothing to check."),
        ("no_step", "hooks", "private_loops.py ended before a step of its private optimizer: there is nothing"),
    ],
)
def test_there_is_nothing_to_check(case: str, mode: str, sentence: str) -> None:
    ran = doctor(case, mode)
    assert ran.returncode == 2
    assert sentence in ran.stderr


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    command = [*interpreter(), "-m", "opacus_memprof", "doctor"]
    for arguments, sentence in (
        (["--script", "nowhere.py"], "the script nowhere.py does not exist"),
        (["--script"], "to check a script: opacus-memprof doctor --script SCRIPT.py [ARGS]"),
    ):
        ran = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
        assert (ran.returncode, ran.stderr.strip()) == (2, f"opacus-memprof: {sentence}")
