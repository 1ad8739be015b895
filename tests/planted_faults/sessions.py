# SPDX-License-Identifier: Apache-2.0
"""Faults in how a session begins and ends, in what an interrupt or a fault of the profiler does, and in advice."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "session/session.py": [
        (
            "The profile has the faults of an earlier session of the process.",
            "        faults.clear()\n",
            "",
            "integration/session::a_later_session_starts_anew",
        ),
        (
            "The profile has the findings of an earlier session of the process.",
            "(native.reset_peaks, observations.clear, virtual_gpu.begin_run)",
            "(native.reset_peaks, virtual_gpu.begin_run)",
            "integration/session::a_later_session_starts_anew",
        ),
        (
            "A session that cannot start removes the profile that was there.",
            "            if is_empty:  # an",
            "            if True:  # an",
            "integration/session::a_start_that_is_refused_leaves_an_earlier_profile",
        ),
        (
            "After a refused start the directory is in use until the process ends.",
            "                self._claimed.clear()\n            self._claim.detach()\n",
            "                self._claimed.clear()\n",
            "integration/session::a_start_that_is_refused_leaves_an_earlier_profile",
        ),
        (
            "A forked child writes a snapshot into its parent's profile.",
            "if _current is not self or self._result is None or self._result.pid != os.getpid():\n            raise",
            "if _current is not self or self._result is None:\n            raise",
            "integration/session::a_child_that_leaves_the_block_leaves_the_profile",
        ),
    ],
    "session/result.py": [
        (
            "The exit code is not what a shell sees.",
            "error.code & 0xFF if",
            "error.code if",
            "integration/session::how_a_block_ends",
        ),
        (
            "The profile does not say why sys.exit ended the program.",
            "(isinstance(error, SystemExit) and not isinstance(error.code, str))",
            "isinstance(error, SystemExit)",
            "integration/session::how_a_block_ends",
        ),
        (
            "A run that is longer than the bound is said to have had a full disk.",
            'if events["error"] and events["dropped"]:',
            'if events["dropped"]:',
            "integration/session::events_that_a_full_disk_has_cost_are_told",
        ),
    ],
    "recording/faults.py": [
        (
            "Ctrl-C in the profiler's code does not end the program.",
            "        if not isinstance(error, Exception):\n            return False\n",
            "        if error is None:\n            return False\n",
            "unit/hooks::an_interrupt_is_no_fault",
        ),
        (
            "Ctrl-C in a function of the profiler does not end the program.",
            "            except Exception as error:\n                record_fault(doing, error)",
            "            except BaseException as error:\n                record_fault(doing, error)",
            "unit/hooks::an_interrupt_is_no_fault",
        ),
        (
            "A fault in each step, with another number, fills the profile.",
            "if sentence in _sentences or len(_sentences) == _MOST_SENTENCES:",
            "if sentence in _sentences:",
            "unit/hooks::a_hundred_faults_are_told_each_once",
        ),
    ],
    "recording/attachment.py": [
        (
            "Ctrl-C while a model is attached does not end the program.",
            "if isinstance(error, MemprofError) or not isinstance(error, Exception):",
            "if isinstance(error, MemprofError):",
            "unit/hooks::an_interrupt_is_no_fault",
        ),
        (
            "What a change that failed had done stays.",
            "        except BaseException as error:\n            unit.detach()\n",
            "        except BaseException as error:\n",
            "unit/hooks::an_interrupt_is_no_fault",
        ),
    ],
    "recording/prometheus.py": [
        (
            "Logical steps are physical ones.",
            "reading.logical_step\n",
            "reading.step\n",
            "integration/stream::a_file_of_lines_stays_bounded_and_whole",
        ),
    ],
    "hooks/optimizer.py": [
        (
            "States that load_state_dict makes are unattributed until the next update.",
            "    attachment.on_detach(original.register_load_state_dict_post_hook(hooks.tag_states).remove)\n",
            "",
            "unit/hooks::states_that_a_program_loads_are_the_optimizer_s",
        ),
    ],
    "hooks/diagnosis.py": [
        (
            "Advice has the names of a function that only evaluates.",
            'if "optimizer" in names or "optimizer" in found:',
            "if found:",
            "unit/hooks::the_names_of_the_program_are_those_where_it_trains",
        ),
        (
            "Advice has the name of a teacher instead of the trained model.",
            "                    _common_parameters(values[name], trained),\n",
            "",
            "unit/hooks::the_names_of_the_program_are_those_where_it_trains",
        ),
    ],
    "hooks/opacus_hooks.py": [
        (
            "Advice shows make_private where the program calls make_private_with_epsilon.",
            '    observations.layer_shapes().engine_call = "make_private_with_epsilon"\n',
            "",
            "integration/opacus_detach::engine_class_attaches_what_it_returns",
        ),
    ],
    "clipping/optimizers/__init__.py": [
        (
            "A large learning rate of the adaptive bound ends the training.",
            "math.exp(min(change, 700.0))",
            "math.exp(change)",
            "integration/clipping_net::the_adaptive_bound_stays_in_its_range",
        ),
        (
            "The adaptive bound falls to 0.",
            "min(max(bound, self.min_clipbound), self.max_clipbound)",
            "min(bound, self.max_clipbound)",
            "integration/clipping_net::the_adaptive_bound_stays_in_its_range",
        ),
    ],
    "clipping/optimizers/optimizer.py": [
        (
            "zero_grad(set_to_none=False) sets gradients to None.",
            "self.original_optimizer.zero_grad(set_to_none)",
            "self.original_optimizer.zero_grad()",
            "integration/clipping_net::the_sizes_of_adaptive_clipping_count_all_parts",
        ),
    ],
    "running/program.py": [
        (
            "The exit code is that of the last rank that failed.",
            "exit_code = exit_code or child_exit_code",
            "exit_code = child_exit_code or exit_code",
            "unit/launch::the_first_rank_that_fails_decides_the_exit_code",
        ),
        (
            "The first rank of a job that the program starts is not known.",
            "for name, value in found.items() if value not in (-1, None)}",
            "for name, value in found.items() if value and value != -1}",
            "unit/launch::what_init_process_group_is_given",
        ),
    ],
    "pytest_plugin/isolation.py": [
        (
            "An isolated test starts workers of its own.",
            '        environment.pop("PYTEST_ADDOPTS", None)\n',
            "",
            "plugin/runs::what_an_isolated_test_gets_of_its_run",
        ),
    ],
    "analysis/oom/failure.py": [
        (
            "Activations of another step are those of forward passes without a backward.",
            "            and group.step == failure.step\n            and group.blocks >= waiting - 1\n",
            "            and group.blocks >= waiting - 1\n",
            "unit/oom_advice::what_should_have_been_released",
        ),
        (
            "What was made before the training is left over from its first step.",
            '        and (group.step or group.phase not in ("idle", "setup"))\n',
            "",
            "unit/oom_advice::what_should_have_been_released",
        ),
    ],
    "hooks/owners.py": [
        (
            "A model through which gradients reach its inputs is said to need no graph.",
            " or any(each.requires_grad for each in native.tensors_in(args))\n",
            "\n",
            "integration/findings_gradients::a_teacher_that_records_graphs_is_named",
        ),
        (
            "A second model with an optimizer of its own is said to need no graph.",
            "each.grad is not None or id(each) in updated for each in parameters",
            "False for each in parameters",
            "integration/findings_gradients::a_teacher_that_records_graphs_is_named",
        ),
    ],
    "analysis/oom/advice/changes.py": [
        (
            "A batch of the expected size is said to be a large draw.",
            "elif case.is_drawn and (program.expected_samples or case.samples) < case.samples:",
            "elif case.is_drawn and program.expected_samples:",
            "unit/oom_advice::the_physical_batch_is_told_in_what_the_program_has",
        ),
        (
            "A program with BatchMemoryManager is told to use it.",
            "    if program.splits_batches:\n",
            "    if False:\n",
            "unit/oom_advice::the_physical_batch_is_told_in_what_the_program_has",
        ),
    ],
}
