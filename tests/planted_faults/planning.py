# SPDX-License-Identifier: Apache-2.0
"""Faults in what a plan runs, without weights and with kernels of Triton too, and in what it reads of runs."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "planning/report.py": [
        (
            "A program fits on a GPU and does not fit there, without a reason.",
            'gpu = f"{configuration.gpu} ({format_bytes(memory_of(configuration))})"',
            "gpu = configuration.gpu",
            "unit/plan_search::progress_lines_say_how_much_memory_the_gpu_has",
        ),
    ],
    "planning/virtual_run.py": [
        (
            "A run that does not fit foretells no limit.",
            '(report["room"]["reserved_bytes"] or 0) + report["request"]["bytes"]',
            'report["room"]["reserved_bytes"] or 0',
            "unit/plan_search::how_a_run_ended",
        ),
        (
            "A run that failed because memory ran out is a program that fails.",
            'status in ("finished", "failed"):',
            'status == "finished":',
            "unit/plan_search::how_a_run_ended",
        ),
        (
            "A run's reserved memory is that at the peak of requested bytes.",
            'data.get("reserved") or peak.get("reserved_bytes")',
            'peak.get("reserved_bytes")',
            "unit/plan_search::how_a_run_ended",
        ),
        (
            "A run that was killed is a program that fails.",
            '"killed" if exit_code < 0 else "failed" if exit_code',
            '"failed" if exit_code',
            "unit/plan_search::how_a_run_ended",
        ),
        (
            "A plan's settings replace those of the environment.",
            "[*([given] if given else []), *settings]",
            "settings",
            "unit/plan_grid::each_cell_is_what_it_says",
        ),
    ],
    "planning/table.py": [
        (
            "A batch is called the largest, and larger ones fit.",
            "MOST_RUNS = 16",
            "MOST_RUNS = 8",
            "unit/plan_search::the_answer_is_what_was_proved",
        ),
        (
            "What does not grow with the batch is taken to shrink with it.",
            "int(bad * (room - base) / (wanted - base))",
            "int(bad * room / wanted)",
            "unit/plan_search::a_run_that_does_not_fit_foretells_the_limit",
        ),
    ],
    "planning/draws.py": [
        (
            "A plan prints the peak of one training in a hundred thousand as that of one in a million.",
            "_QUANTILES = (0.5, 0.9, 0.99, 0.999999)",
            "_QUANTILES = (0.5, 0.9, 0.99, 0.99999)",
            "unit/plan_search::drawn_batches_are_searched_and_their_peaks_computed",
        ),
        (
            "The computed peaks of drawn batches are not on the line of those that ran.",
            "line.base + line.slope * size",
            "line.base * line.slope + size",
            "unit/plan_search::drawn_batches_are_searched_and_their_peaks_computed",
        ),
        (
            "The probability of a batch of at least the size that fits.",
            "betainc(size + 1, self.samples - size, self.rate)",
            "betainc(size, self.samples - size + 1, self.rate)",
            "unit/plan_poisson",
        ),
        (
            "The last part of a logical batch is not tried.",
            "size * max(2, math.ceil(most / size))",
            "size * max(1, most // size)",
            "unit/plan_poisson::a_logical_batch_is_tried_in_all_its_parts",
        ),
    ],
    "planning/verdict.py": [
        (
            "What a plan has to spare is what one run has left.",
            "return self.memory - self.needed",
            "return self.memory - (self.run.reserved or 0)",
            "unit/plan_search::advice_is_tried_and_what_fits_comes_first",
        ),
        (
            "A plan runs each suggestion, however many there are.",
            "[*fitting, *others][:_MOST_ADVICE]",
            "[*fitting, *others]",
            "unit/plan_search::advice_is_tried_and_what_fits_comes_first",
        ),
        (
            "What was tried and fits stands last.",
            "else 0 if advice.tried.fits else 2",
            "else 2 if advice.tried.fits else 0",
            "unit/plan_search::advice_is_tried_and_what_fits_comes_first",
        ),
        (
            "What a program needs that fits on no GPU lacks CUDA's context.",
            "run.may_reserve or 0) + (run.context or 0)",
            "run.may_reserve or 0)",
            "unit/plan_search::advice_is_tried_and_what_fits_comes_first",
        ),
        (
            "A change that was applied to nothing is said to be too large.",
            '(_IN_MAKE_PRIVATE if report.get("mode") else set())',
            "_IN_MAKE_PRIVATE",
            "unit/plan_search::changes_to_make_private_are_tried_at_its_call",
        ),
        (
            "A plan runs ghost clipping with a program that takes no criterion.",
            'if action["value"] == "ghost":',
            'if action["value"] == "flash_clip":',
            "unit/plan_search::advice_is_tried_and_what_fits_comes_first",
        ),
        (
            "A plan's least memory lacks CUDA's context.",
            "return _whole((run.context or 0) + (run.reserved or 0))",
            "return _whole(run.reserved or 0)",
            "unit/plan_search::a_small_program_needs_its_context_and_what_it_reserves",
        ),
        (
            "Another kind is predicted with this one's context.",
            "gpu.total_memory >= gpu.context_memory + beyond_context",
            "gpu.total_memory >= self.needed",
            "unit/plan_search::another_kind_is_predicted_with_its_own_context",
        ),
        (
            "A plan's least memory lacks up to a MiB.",
            "return -(-size // _MIB) * _MIB",
            "return size // _MIB * _MIB",
            "unit/plan_search::a_small_program_needs_its_context_and_what_it_reserves",
        ),
    ],
    "planning/runs.py": [
        (
            "A plan that is resumed takes runs whose profiles are gone.",
            " and Path(run.directory).is_dir():",
            ":",
            "unit/plan_search::killed_runs_are_run_again_and_only_results_are_kept",
        ),
    ],
    "planning/configuration.py": [
        (
            "A flag at the end of a command is a traceback.",
            "and index + 1 < len(arguments)",
            "and index < len(arguments)",
            "unit/plan_arguments::an_argument_is_changed_where_it_is_given",
        ),
        (
            "The end of a grid's range is run twice.",
            "while 2 * values[-1] < self.high:",
            "while 2 * values[-1] <= self.high:",
            "unit/plan_grid::of_several_searches_the_first_range_is_searched",
        ),
        (
            "A plan runs batches of no samples.",
            "if low < 1:",
            "if low < 0:",
            "unit/plan_grid::searches_that_say_nothing",
        ),
        (
            "A job that an executor plans is one process.",
            'content["ranks"],',
            "1,",
            "unit/plan_grid::each_cell_is_what_it_says",
        ),
    ],
    "planning/changes.py": [
        (
            "A program of ghost clipping takes the criterion for its optimizer.",
            "prepared.insert(2,",
            "prepared.insert(1,",
            "unit/plan_arguments::a_ghost_clipping_program_s_criterion_keeps_its_place",
        ),
        (
            "A plan draws samples that the data set does not have.",
            "range(min(size, sampler.num_samples))",
            "range(size)",
            "unit/plan_arguments::drawn_batches_have_the_size_that_is_planned",
        ),
        (
            "Each batch that a plan draws is the whole data set.",
            "range(min(size, sampler.num_samples))",
            "range(sampler.num_samples)",
            "unit/plan_arguments::drawn_batches_have_the_size_that_is_planned",
        ),
    ],
    "virtual_gpu/no_weights.py": [
        (
            "Small parameters have no values.",
            "_is_in_place(func) and _bytes(args[0]) > _SMALL",
            "_is_in_place(func) and _bytes(args[0]) >= _SMALL",
            "integration/virtual_values::large_parameters_stay_unwritten_and_small_ones_do_not",
        ),
        (
            "A parameter keeps its shape when it is resized.",
            '("set_", "resize_", "detach_", "requires_grad_")',
            '("set_", "detach_", "requires_grad_")',
            "integration/virtual_values::large_parameters_stay_unwritten_and_small_ones_do_not",
        ),
        (
            'A model has the dtype "auto".',
            'if requested in (None, "auto")',
            "if requested is None",
            "integration/virtual_values::a_model_without_weights_has_the_requested_dtype",
        ),
        (
            "A model of an old configuration has no dtype.",
            "(torch.float32 if default is None else default)",
            "default",
            "integration/virtual_values::a_model_without_weights_has_the_requested_dtype",
        ),
        (
            "transformers says nothing any more.",
            "        logging.set_verbosity(verbosity)\n",
            "",
            "integration/virtual_values::transformers_says_again_what_it_said_before",
        ),
        (
            "Weights that a program gives itself are left out.",
            ' or options.get("state_dict") is not None',
            "",
            "integration/virtual_values::weights_that_a_program_gives_itself_are_loaded",
        ),
        (
            "A tensor like another one is on the CPU.",
            'kwargs.get("device") or (args[0].device if',
            'kwargs.get("device") or (None if',
            "integration/virtual_values::large_parameters_stay_unwritten_and_small_ones_do_not",
        ),
        (
            "A shift gives back what it was to shift.",
            ' and not name.endswith("__")',
            "",
            "integration/virtual_values::large_parameters_stay_unwritten_and_small_ones_do_not",
        ),
    ],
    "virtual_gpu/values.py": [
        (
            "What a kernel adds to is taken for known.",
            "tt\\.(?:store|atomic_\\w+|",
            "tt\\.(?:store|",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
        (
            "A table of offsets is taken for unknown.",
            'elif "tt.load" not in line:',
            "else:",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
        (
            "What a loop hands on is not followed.",
            "                results = list(regions[-1])\n",
            "                results = []\n",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
        (
            "Of two branches' pointers one is followed.",
            "                results = list(regions.pop())\n",
            "                regions.pop()\n",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
        (
            "What assembly may write is taken for known.",
            "                written |= found\n",
            "                pass\n",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
        (
            "A kernel that calls a function is said to write nothing.",
            "if header is None or _ELSEWHERE.search(ttir):",
            "if header is None:",
            "integration/virtual_values::what_a_kernel_writes_is_what_it_stores_through",
        ),
    ],
}
