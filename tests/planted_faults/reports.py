# SPDX-License-Identifier: Apache-2.0
"""Faults in what people read: exports, tables, options, sentences, and figures and limits of tests."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "reports/memory_viz.py": [
        (
            "A snapshot's times begin at 1970.",
            "(self._start + time) // 1000",
            "time // 1000",
            "unit/memory_viz::the_trace_tells_every_event",
        ),
        (
            "A block keeps the module that it had before its module was known.",
            "if after != before:",
            "if after.category != before.category:",
            "unit/memory_viz::the_cpu_is_device_0_where_it_is_alone",
        ),
    ],
    "reports/tables.py": [
        (
            "Live bytes begin at zero after every ten thousand events.",
            "result[of_device] = live[device] + np.cumsum(",
            "result[of_device] = np.cumsum(",
            "unit/parquet::live_bytes_go_on_from_chunk_to_chunk",
        ),
        (
            "Tables have a column without cells.",
            "{'r' * (len(header) - 1)}",
            "{'r' * len(header)}",
            "unit/export::latex_tables_are_whole_and_escaped",
        ),
        (
            "A table does not say how many events are missing.",
            "(STEP, SNAPSHOT, GAP)",
            "(STEP, SNAPSHOT)",
            "unit/parquet::a_gap_has_a_number_of_events_and_no_device",
        ),
        (
            "Tables do not add up to the peak.",
            "        if size:\n",
            "        if size > 1:\n",
            "unit/export::a_peak_after_the_event_file_was_full",
        ),
    ],
    "reports/summary.py": [
        (
            "The rest of the categories is said to be all of them.",
            "count=len(rows) - _CATEGORIES)",
            "count=len(rows))",
            "unit/summary::of_many_categories_the_largest_five_are_named",
        ),
    ],
    "reports/diff.py": [
        (
            "A difference has a row more than it should.",
            "\n_TOP = 10\n",
            "\n_TOP = 11\n",
            "unit/diff::what_shrank_most_stands_first",
        ),
        (
            "A tax has a row more than it should.",
            "\n_TOP_MODULES = 9\n",
            "\n_TOP_MODULES = 10\n",
            "unit/tax::of_many_modules_the_nine_that_cost_most_are_printed",
        ),
    ],
    "cli/look.py": [
        (
            "report --html --vanilla needs a file name.",
            "if vanilla and html is None:",
            "if vanilla and not html:",
            "unit/tax::the_command",
        ),
    ],
    "cli/profile.py": [
        (
            "top takes the directory 7 for a process.",
            "target.isdecimal() and not Path(target).exists()",
            "target.isdecimal()",
            "unit/live::a_directory_whose_name_is_a_number_is_no_process",
        ),
    ],
    "cli/options.py": [
        (
            "A token that is an argument of its own stays in the stored command.",
            'argument == "--token" and index',
            'argument == "--tokens" and index',
            "unit/cli_options::a_token_is_no_part_of_the_stored_command",
        ),
        (
            "sweep --config looks for a built-in model on the hub.",
            "default, pretrained = config, False",
            "default, pretrained = config, pretrained",
            "unit/cli_options::a_built_in_model_is_not_a_pretrained_one",
        ),
    ],
    "session/session.py": [
        (
            "An engine that is followed twice has two entries for a model.",
            "if check not in self._privacy_checks:",
            "if True:",
            "unit/privacy_check::a_check_that_is_followed_twice_is_written_once",
        ),
    ],
    "analysis/verdict_view.py": [
        (
            "Checks of consecutive steps are listed one by one.",
            "first <= merged[-1][1] + 1",
            "first <= merged[-1][1]",
            "unit/privacy_check::checks_that_follow_one_another_are_one_span",
        ),
    ],
    "hooks/observers.py": [
        (
            "Forwards that may still share a backward are a leak.",
            "_FORWARDS_IN_A_ROW = 3",
            "_FORWARDS_IN_A_ROW = 2",
            "integration/findings_captures::a_program_that_ends_among_the_forwards_of_a_batch",
        ),
    ],
    "pytest_plugin/limits.py": [
        (
            "Of several limits of a test one is checked.",
            'for mark in item.iter_markers("limit_gpu_memory"):',
            'for mark in [*item.iter_markers("limit_gpu_memory")][:1]:',
            "plugin/limits::each_limit_is_checked_and_small_categories_are_summed",
        ),
        (
            "The size of small categories together is that of the largest ones.",
            "sum(size for _, size in ranked[_TOP:])",
            "sum(size for _, size in ranked[:_TOP])",
            "plugin/limits::each_limit_is_checked_and_small_categories_are_summed",
        ),
        (
            "A test fails that takes exactly its limit.",
            "            if used > self.size:\n",
            "            if used >= self.size:\n",
            "plugin/limits::limits_of_modules_and_phases",
        ),
        (
            "A leak is not said to be a module's.",
            "key = f\"{block['category']}{where}, made in",
            "key = f\"{block['category']}, made in",
            "plugin/limits::a_leak_is_said_to_be_its_module_s",
        ),
        (
            "A test fails that leaks exactly its limit.",
            "            if size > limit:\n",
            "            if size >= limit:\n",
            "plugin/limits::a_leak_is_said_to_be_its_module_s",
        ),
        (
            "Leaks on several GPUs are compared with the limit together.",
            'by_device.setdefault(block["device"], [])',
            'by_device.setdefault("cuda:0", [])',
            "plugin/limits::a_leak_is_said_to_be_its_module_s",
        ),
        (
            "A limit of the module 1 counts the module 10.",
            'name.startswith(f"{module}.")',
            'name.startswith(f"{module}")',
            "plugin/limits::a_module_is_not_one_whose_name_begins_alike",
        ),
    ],
    "pytest_plugin/clean_session.py": [
        (
            "A leak at the address of a freed block is not a test's own.",
            "(kind == SEED) & ~np.isin(block, block[kind == FREE])",
            "kind == SEED",
            "plugin/sessions::blocks_from_before_a_test_are_told_from_its_own",
        ),
        (
            "What a test attaches is not in its breakdown.",
            '_keys(live[~np.isin(live["block"], retagged)])',
            "_keys(live)",
            "plugin/sessions::blocks_from_before_a_test_are_told_from_its_own",
        ),
        (
            "A shared model is not in the peak of a test that attaches it.",
            'np.unique(rows["event"][~np.isin(block, retagged)])',
            'np.unique(rows["event"])',
            "plugin/sessions::blocks_from_before_a_test_are_told_from_its_own",
        ),
        (
            "The pieces of a test's events are read in any order.",
            "    pieces.sort(key=lambda piece: piece[0])\n",
            "",
            "plugin/sessions::events_of_all_pieces_are_read_in_their_order",
        ),
        (
            "Blocks that lived when a piece began count twice.",
            "records[seeds:]",
            "records",
            "plugin/sessions::events_of_all_pieces_are_read_in_their_order",
        ),
        (
            "What became of blocks counts as events.",
            " >> 48 & 255 != _SETTLED]",
            " >> 48 & 255 != 255]",
            "plugin/sessions::events_of_all_pieces_are_read_in_their_order",
        ),
        (
            "A baseline of functorch is compared with one of samplers.",
            'return "functorch" if functorch else "hooks"',
            'return "hooks"',
            "plugin/sessions::functorch_is_a_mode_where_it_replaces_samplers",
        ),
        (
            "A layer without a sampler makes a run one of functorch.",
            "type(layer) in samplers and hasattr",
            "hasattr",
            "plugin/sessions::functorch_is_a_mode_where_it_replaces_samplers",
        ),
        (
            "A limit is checked on a part of a test.",
            'if native.events_status()["dropped"]:',
            'if native.events_status()["dropped"] > 1:',
            "plugin/sessions::a_test_with_too_many_events_has_no_figures",
        ),
    ],
    "pytest_plugin/baseline.py": [
        (
            "Two processes update a file of baselines at a time.",
            "fcntl.LOCK_EX",
            "fcntl.LOCK_SH",
            "unit/baseline_files::one_process_updates_a_file_at_a_time",
        ),
    ],
    "analysis/profile.py": [
        (
            "A file that had to leave out events is said to be truncated.",
            ">= count\n",
            "> 0\n",
            "unit/events::where_events_are_missing_is_told",
        ),
        (
            "A file whose last events were lost is said to be truncated.",
            'at_end and gaps[-1].events > header["dropped"]',
            "at_end",
            "unit/events::where_events_are_missing_is_told",
        ),
        (
            "Of fewer events than there were some are missing.",
            "max(count, gaps[-1].first_event + gaps[-1].events)",
            "count",
            "unit/events::where_events_are_missing_is_told",
        ),
        (
            "Findings of a run without memory are left out as a failure's.",
            'failed=status == "failed"',
            'failed=status != "finished"',
            "unit/events::findings_know_whether_the_run_failed",
        ),
    ],
}
