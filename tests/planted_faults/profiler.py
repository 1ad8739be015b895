# SPDX-License-Identifier: Apache-2.0
"""Faults of the profiler: recording, hooks, baselines of the pytest plug-in, the virtual GPU, reports and languages."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "pytest_plugin/baseline.py": [
        (
            "A peak that grew by exactly 2 % passes.",
            "new - old >= rel * old",
            "new - old > rel * old",
            "unit/baseline_files::what_reaches_the_tolerance_has_grown",
        ),
        (
            "An update removes the entries of other devices.",
            "if entry.key != measured.key]",
            "if entry.key.mode != measured.key.mode]",
            "unit/baseline_files::an_update_replaces_the_entry_of_its_device",
        ),
        (
            "Of several GPUs the one with the lowest peak has a baseline.",
            "max(devices.items(), key=lambda",
            "min(devices.items(), key=lambda",
            "unit/baseline_files::the_device_with_the_highest_peak_is_measured",
        ),
        (
            "A baseline holds for one build of torch alone.",
            'torch=torch.__version__.partition("+")[0]',
            "torch=torch.__version__",
            "unit/baseline_files::the_device_with_the_highest_peak_is_measured",
        ),
        (
            "The key of a test with several modes differs from run to run.",
            '"+".join(sorted(modes))',
            '"+".join(modes)',
            "unit/baseline_files::the_device_with_the_highest_peak_is_measured",
        ),
        (
            "Of many modules those that grew least are named.",
            "(-growth[name], name))[:_TOP]",
            "(growth[name], name))[:_TOP]",
            "unit/baseline_files::of_many_modules_those_that_grew_most_are_named",
        ),
    ],
    "recording/live.py": [
        (
            "A program that has turned garbage collection off gets it back.",
            "        if gc_was_enabled:\n            gc.enable()",
            "        gc.enable()",
            "unit/snapshots::a_program_s_collection_stays_off",
        ),
        (
            "A GPU on which nothing is live has unknown figures.",
            "if requested > 0 == counted:",
            "if counted == 0:",
            "unit/snapshots::an_empty_device_is_counted",
        ),
    ],
    "recording/stream.py": [
        (
            "Ranks of two machines write one file.",
            'f"{path.stem}.rank_{launch.rank}{path.suffix}"',
            'f"{path.stem}.rank_{launch.local_rank}{path.suffix}"',
            "integration/stream::each_rank_has_a_file_of_its_own",
        ),
        (
            "What was streamed before the bound is gone.",
            'os.replace(self._path, f"{self._path}.1")',
            "os.unlink(self._path)",
            "integration/stream::a_file_of_lines_stays_bounded_and_whole",
        ),
        (
            "The second machine serves at other ports than the first.",
            "port + (launch.local_rank if",
            "port + (launch.rank if",
            "integration/stream::each_rank_has_a_file_of_its_own",
        ),
        (
            "Where one sink is refused the others stay open.",
            "            self._close(*self._sinks)\n            raise",
            "            raise",
            "integration/stream::a_port_that_is_taken",
        ),
        (
            "A full file is not found after the program has changed its directory.",
            "Path(path).absolute()  # the program may",
            "Path(path)  # the program may",
            "integration/stream::a_file_of_lines_stays_bounded_and_whole",
        ),
    ],
    "hooks/observers.py": [
        (
            "Forwards that share a backward are a leak after a step with fewer.",
            "0, 0, max(_most_released, _most_outstanding)",
            "0, 0, _most_outstanding",
            "integration/findings_captures::a_program_that_ends_among_the_forwards_of_a_batch",
        ),
        (
            "Ghost clipping's matrices count half.",
            "tokens**2 * (2 * weight + bias)",
            "tokens**2 * (weight + bias)",
            "integration/findings_ghost",
        ),
        (
            "A gradient that is a view of the sum is said to be replaced.",
            "gradient.data_ptr() != parameter.summed_grad.data_ptr()",
            "gradient is not parameter.summed_grad",
            "unit/hooks::gradients_that_noise_replaces_are_noted_once",
        ),
        (
            "Gradients are noted in each step, which costs time.",
            "    _noise_optimizers.add(optimizer)\n",
            "",
            "unit/hooks::gradients_that_noise_replaces_are_noted_once",
        ),
    ],
    "hooks/components.py": [
        (
            "A first convolution of 1 by 1 pixels is an embedding.",
            "module.stride == module.kernel_size and max(module.stride) > 1",
            "module.stride == module.kernel_size",
            "integration/module_components::a_first_convolution_that_cuts_patches_is_an_embedding",
        ),
        (
            "Queries, keys and values without an output are an MLP.",
            "len(narrow) > 2",
            "len(narrow) > 3",
            "integration/module_components::the_widths_of_a_block_tell_what_its_linears_do",
        ),
        (
            "Layers of GPT-2 read what they return.",
            "width, to = module.weight.shape",
            "to, width = module.weight.shape",
            "integration/module_components::the_widths_of_a_block_tell_what_its_linears_do",
        ),
        (
            "Each Linear of a model as wide as its vocabulary is a head.",
            "to == self._vocabulary != width",
            "to == self._vocabulary",
            "integration/module_components::models_without_blocks",
        ),
        (
            "A Linear with its activation is a block.",
            "for _, module in self._inside(name)) > 1",
            "for _, module in self._inside(name)) > 0",
            "integration/module_components::models_without_blocks",
        ),
        (
            "A Linear between two blocks is a head.",
            "> max(order.index(block)",
            "> min(order.index(block)",
            "integration/module_components::a_linear_between_blocks_is_no_head",
        ),
    ],
    "language.py": [
        (
            "A report that has no language of its own is English in a Chinese block.",
            "_of_block.set(_of_block.get() if language is None else checked(language))",
            "_of_block.set(None if language is None else checked(language))",
            "unit/language",
        ),
    ],
    "reports/diff.py": [
        (
            "A | in a name ends a cell.",
            '"\\\\`*_[]<>|#"',
            '"\\\\`*_[]<>#"',
            "unit/diff::names_are_shown_as_they_are_in_markdown",
        ),
        (
            "A module that shrank most stands last, or is not shown.",
            "key=lambda item: (-abs(sum(item[1].values())), ",
            "key=lambda item: (-sum(item[1].values()), ",
            "unit/diff::what_shrank_most_stands_first",
        ),
    ],
    "virtual_gpu/devices.py": [
        (
            "A GPU runs kernels that are newer than it is.",
            "kernel // 10 == self.major and kernel <= capability",
            "kernel // 10 == self.major",
            "unit/virtual_devices::kernels_are_the_newest_of_torchs_that_run_there",
        ),
    ],
    "virtual_gpu/decisions.py": [
        (
            "A branch on a list that was extended by unknown values is not told.",
            "call.func.attr in _KEEPS and",
            'call.func.attr in {"append"} and',
            "unit/virtual_decisions::what_reaches_a_condition_an_index_or_a_shape_decides",
        ),
    ],
    "recording/prometheus.py": [
        (
            "Prometheus gets the accountant's steps twice.",
            'that ended.", reading.step)',
            'that ended.", reading.logical_step)',
            "integration/stream::a_file_of_lines_stays_bounded_and_whole",
        ),
    ],
    "analysis/device.py": [
        (
            "The forward after a proof begins in the proof.",
            "first <= event < end for",
            "first <= event <= end for",
            "unit/analysis::a_proof_is_a_phase_of_its_own",
        ),
        (
            "The largest reserved memory is that of up to a second before the end.",
            "reserved_peak=reserved if live is None else live.reserved_peak",
            "reserved_peak=reserved",
            "unit/analysis::the_counters_add_what_the_allocator_had",
        ),
        (
            "Of many operations a profile has the smallest.",
            "(-sum(item[1].values()), item[0])",
            "(sum(item[1].values()), item[0])",
            "unit/analysis::the_peak_is_told_in_names",
        ),
    ],
    "profiles/units.py": [
        (
            "A size with a fraction of a byte is larger than what was written.",
            "return int(Fraction(match[1]) * unit)",
            "return round(Fraction(match[1]) * unit)",
            "unit/units::sizes_are_read_exactly",
        ),
        (
            "Results of experiments have two units after a report within them.",
            "in_megabytes.reset(token)",
            "in_megabytes.set(False)",
            "unit/units::results_of_experiments_have_one_unit",
        ),
    ],
    "profiles/directory.py": [
        (
            "The first rank of each machine removes the summary of the job.",
            "self.launch.rank == 0:",
            "self.launch.local_rank == 0:",
            "unit/ranks::ranks_that_a_smaller_job_does_not_have_go",
        ),
        (
            "A rank that is copied again has events of an earlier run.",
            "        to.rm(copy, recursive=True)",
            "        pass",
            "unit/ranks::ranks_are_gathered_from_machines_without_a_common_disk",
        ),
    ],
    "profiles/json_object.py": [
        (
            "A result of a newer release does not say which release reads it.",
            'content.get("versions") or content.get("environment")',
            'content.get("versions")',
            "unit/json_object::a_newer_format_names_the_version_that_is_needed",
        ),
    ],
    "hooks/inputs.py": [
        (
            "A target that is given by keyword is unattributed.",
            'kwargs.get("target")',
            "None",
            "integration/targets::the_target_is_an_input",
        ),
        (
            "What a divergence compares with is unattributed.",
            '        "kl_div",\n',
            "",
            "integration/targets::the_target_is_an_input",
        ),
        (
            "Ghost clipping's targets that are given by keyword are unattributed.",
            "native.tensors_in((args[1:], kwargs))",
            "native.tensors_in(args[1:])",
            "integration/inputs::targets_of_the_criterion_that_opacus_wraps",
        ),
    ],
    "hooks/owners.py": [
        (
            "The heap is searched for what is little of the live bytes.",
            '_MATERIAL_SHARE * live[name]["requested_bytes"]',
            "_MATERIAL_SHARE",
            "integration/owners::owners_are_searched_from_a_hundredth_of_the_live_bytes",
        ),
        (
            "The heap is searched again for what has no owner.",
            "            self._left = _unclaimed()\n",
            "",
            "integration/owners::owners_are_searched_from_a_hundredth_of_the_live_bytes",
        ),
    ],
}
