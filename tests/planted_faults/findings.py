# SPDX-License-Identifier: Apache-2.0
"""Faults in what is a finding and what is not, of a run and of a job, and in what a virtual GPU does not know."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "analysis/oom/estimate.py": [
        (
            "Activations that operations before a layer have saved count as the layer's own.",
            "sizes = saved.own if layer == block.module else saved.before",
            "sizes = saved.own",
            "integration/mode_estimates",
        ),
    ],
    "analysis/oom/step.py": [
        (
            "Of a loss whose gradient failed in backward, no further gradient is expected.",
            'return Instant("backward", "", parts, is_loss=True)',
            'return Instant("forward", "", parts, is_loss=True)',
            "integration/oom::the_gradients_of_the_loss_are_needed_after_its_first",
        ),
        (
            "What zero_grad clears after the forward pass is not expected in it.",
            'self._left_by_update(n) if self.clears_late else {"gradients"',
            'self._left_by_update(n) if n < 0 else {"gradients"',
            "integration/oom::gradients_cleared_after_the_forward_pass_live_in_it",
        ),
    ],
    "analysis/findings.py": [
        (
            "The matrices of the first layer count as the largest.",
            'max(observations, key=lambda named: named[1]["bytes"])\n    p, d',
            "observations[0]\n    p, d",
            "unit/findings::the_largest_matrices_count",
        ),
        (
            "Per-sample gradients whose original is gone are held twice.",
            "block.op == _COPIES and results[block.bytes]",
            "block.op == _COPIES",
            "unit/findings::only_copies_whose_original_is_live_are_copies",
        ),
        (
            "Gradients that are used, or gone, count as discarded.",
            "min(size, live.get(module, 0)) for",
            "max(size, live.get(module, 0)) for",
            "unit/findings::discarded_gradients_are_those_that_are_live",
        ),
        (
            "A batch that a program has skipped twice is a defect.",
            "_OFTEN = 3",
            "_OFTEN = 2",
            "unit/findings::unused_per_sample_gradients_of_three_passes",
        ),
        (
            "A failure's own cause is not alone among the findings.",
            "if times < _OFTEN or run.failed or not",
            "if times < _OFTEN or not",
            "unit/findings::unused_per_sample_gradients_of_three_passes",
        ),
    ],
    "analysis/kept_memory.py": [
        (
            "The output of the last step, which a variable holds, is a kept graph.",
            "block.step < peak.step - 1",
            "block.step < peak.step",
            "unit/findings::activations_of_an_evaluation_two_steps_ago",
        ),
        (
            "Collected outputs that are detached are kept graphs.",
            "len({block.module for block in old}) > 1",
            "len({block.module for block in old}) > 0",
            "unit/findings::activations_of_an_evaluation_two_steps_ago",
        ),
        (
            "The peak of a training step is taken for an evaluation's.",
            '(peak.phase, peak.step) == ("forward", seen["step"])',
            'peak.phase == "forward"',
            "unit/findings::an_evaluation_at_the_peak",
        ),
        (
            "Memory that grows in a quarter of the steps is not found.",
            'residue["steps"] >= max(MIN_STEPS,',
            'residue["steps"] > max(MIN_STEPS,',
            "unit/findings::memory_that_grows_in_a_quarter_or_nearly_all_steps",
        ),
        (
            "Small memory that six of many steps have left is reported.",
            "steps >= max(REGULAR_STEPS, REGULAR_SHARE",
            "steps >= min(REGULAR_STEPS, REGULAR_SHARE",
            "unit/findings::memory_that_grows_in_a_quarter_or_nearly_all_steps",
        ),
        (
            "Steps that the replay leaves out are expected to grow as well.",
            "_MARGIN = 4",
            "_MARGIN = 2",
            "unit/findings::memory_that_grows_in_a_quarter_or_nearly_all_steps",
        ),
        (
            "What grows each time is what has grown in all.",
            "total // steps",
            "total // len(found)",
            "unit/findings::memory_that_grows_in_a_quarter_or_nearly_all_steps",
        ),
    ],
    "analysis/defects.py": [
        (
            "A module with one sample gets the remedy of one with too many.",
            "    if count < batch:\n",
            "    if count > batch:\n",
            "unit/findings::numbers_of_samples_that_are_too_few_or_too_many",
        ),
        (
            "Modules that wait for a backward are said to be unused.",
            'if not seen["captures"]]',
            'if seen["captures"]]',
            "unit/findings::modules_that_wait_for_a_backward_do_not_miss_samples",
        ),
    ],
    "analysis/job.py": [
        (
            "A rank is a straggler that has exactly 5 % more than the others.",
            "peak.requested_bytes > STRAGGLER * median",
            "peak.requested_bytes >= STRAGGLER * median",
            "unit/ranks::ranks_that_count_little_are_no_imbalance",
        ),
        (
            "A rank that ended before its first step is an imbalance.",
            "if row.peak and row.steps}",
            "if row.peak}",
            "unit/ranks::ranks_that_count_little_are_no_imbalance",
        ),
    ],
    "virtual_gpu/describe.py": [
        (
            "What an earlier run could not compute is in a later one's profile.",
            "if count > earlier.get(name, 0)}",
            "if count >= earlier.get(name, 0)}",
            "unit/virtual_docs::a_run_adds_up_its_uses_by_line",
        ),
        (
            "A read of an earlier run is in a later one's profile.",
            "return [use for use in differences if use.count]",
            "return differences",
            "unit/virtual_docs::a_run_adds_up_its_uses_by_line",
        ),
        (
            "Reads of a line are counted by the ways there.",
            "counts[use.operation, use.line] += use.count",
            "counts[use.operation, use.line] += 1",
            "unit/virtual_docs::a_run_adds_up_its_uses_by_line",
        ),
        (
            "A single read is said to have come 1 times.",
            'times," if use.count > 1',
            'times," if use.count > 0',
            "unit/virtual_docs::each_line_has_a_count_and_others_are_added",
        ),
        (
            "Operations of further lines are counted by lines.",
            "{sum(use.count for use in rest)} more",
            "{len(rest)} more",
            "unit/virtual_docs::each_line_has_a_count_and_others_are_added",
        ),
        (
            "A sentence has the profiler's own word before an operation.",
            "operation = use.operation.removeprefix(_OF_RANKS)",
            "operation = use.operation",
            "unit/virtual_docs::each_line_has_a_count_and_others_are_added",
        ),
    ],
    "virtual_gpu/decisions.py": [
        (
            "An exception's text decides what a program does.",
            "if isinstance(statement, ast.Raise):",
            "if isinstance(statement, ast.Pass):",
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
        (
            "The last part of a condition decides its others.",
            "any(map(has, node.values[:-1]))",
            "any(map(has, node.values))",
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
        (
            "What is gathered is looked for in what was given.",
            '"gather_object": 1',
            '"gather_object": 0',
            "unit/virtual_decisions::what_reaches_a_condition_an_index_or_a_shape_decides",
        ),
        (
            "The value that fills a tensor decides its size.",
            '(name != "full" or',
            '(name == "full" or',
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
        (
            "Of several statements on a line the last one decides.",
            "here = _around(here, frame) or here",
            "here = here or _around(here, frame)",
            "unit/virtual_decisions::a_reading_statement_among_others_decides",
        ),
        (
            "All that reads on a line is taken for what has read.",
            "if evaluated is not None:",
            "if False:",
            "unit/virtual_decisions::a_reading_statement_beside_others_decides_nothing",
        ),
        (
            "Which is the largest does not decide.",
            'keyword.arg == "key" and has',
            'keyword.arg == "keys" and has',
            "unit/virtual_decisions::what_reaches_a_condition_an_index_or_a_shape_decides",
        ),
        (
            "A list that a value repeats is of a known length.",
            "for one, two in ((node.left, node.right), (node.right, node.left))",
            "for one, two in ((node.left, node.right),)",
            "unit/virtual_decisions::what_reaches_a_condition_an_index_or_a_shape_decides",
        ),
        (
            "log_loss decides by the loss.",
            '_SHOWS.isdisjoint(name.split("_"))',
            "name not in _SHOWS",
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
        (
            "An object that keeps a loss decides by it.",
            " or name[:1].isupper()",
            "",
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
        (
            "What one rank gathers is not followed to the condition that reads it.",
            "(given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,)",
            "(given,)",
            "unit/virtual_decisions::what_reaches_a_condition_an_index_or_a_shape_decides",
        ),
        (
            "Objects that are gathered and printed decide what a program does.",
            " or name in _FILLS",
            "",
            "unit/virtual_decisions::what_is_shown_or_kept_decides_nothing",
        ),
    ],
}
