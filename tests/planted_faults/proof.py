# SPDX-License-Identifier: Apache-2.0
"""Faults in the proof that samples do not mix and that gradients are autograd's: checks left out, or too weak."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/module/calls.py": [
        (
            "A mean over the batch is taken for a sum.",
            'if other == "mean":',
            "if False:",
            ("between_loss_mean", "between_loss_mean_in_the_model"),
        ),
        (
            "A loss term beside the outputs is accepted.",
            "                check_explained(each, own,",
            "                (each, own,",
            ("outputs_aux_sums", "outputs_aux_mixes", "outputs_aux_in_list", "outputs_features_by_hook"),
        ),
        (
            "Two threads that run the model at once end in another error, or in none.",
            "if threading.get_ident() == self.thread or",
            "if True or",
            ("transform_layers_in_threads", "transform_called_by_threads"),
        ),
    ],
    "clipping/proof/loss_graph.py": [
        (
            "A mean over a sample's numbers is taken for one over the batch.",
            "and 0 not in dims",
            "and True",
            "between_loss_mean_of_sums",
        ),
    ],
    "clipping/module/between_calls.py": [
        (
            "Detached values of other samples reach the next call.",
            "any(any(map(mode.mixes, leaves)) for mode in modes)",
            "False",
            "parts_detached_mean",
        ),
        (
            "A number of the batch that the program reads is used for the next call.",
            "any(mode.reads_numbers for mode in self._modes)",
            "False",
            ("parts_number", "parts_condition"),
        ),
        (
            "What a checked step leaves is not known in the next one.",
            "(step > 1 and is_checked(check, step - 1))",
            "False",
            "left_queue_first",
        ),
        (
            "The program writes what it computes from outputs into the model.",
            "(*model.named_parameters(), *model.named_buffers())",
            "()",
            ("left_buffer", "left_parameter"),
        ),
        (
            "A loss outside of the model mixes samples.",
            "mixes |= bool(losses) and not mode.adds_up(losses, given)",
            "mixes |= False",
            ("between_loss_of_pairs", "between_loss_root_of_the_sum", "between_loss_by_the_largest"),
        ),
        (
            "A loss outside of the model gives a sample a gradient that depends on other samples.",
            "mixes = mode.mixes_gradients(gradient, where)",
            "mixes = False",
            ("labels_counted_in_backward", "labels_divided_in_backward"),
        ),
        (
            "Steps in which nothing can be seen take the place of those that are checked.",
            "step, new_at = self._step + (not self._is_too_small),",
            "step, new_at = self._step + 1,",
            "labels_after_batches_of_one",
        ),
        (
            "A second private model is called before the loss of the first, which then mixes samples.",
            "        for mode in self._of_models:\n            mode.enter()\n",
            "",
            ("interrupted_calls_another_and_mixes", "interrupted_trains_another_and_mixes"),
        ),
        (
            "Two calls have a backward each, and the second loss mixes samples.",
            "if mode.waiting:",
            "if False:",
            ("interrupted_two_calls_two_backwards_and_mixes", "interrupted_two_losses_of_a_call_and_mixes"),
        ),
        (
            "A call of one sample without gradients comes between another call and its loss, which mixes samples.",
            "            mode.waiting.add(forward)\n        self.resume()",
            "            mode.waiting.add(forward)\n        if mode is not None:\n            self.resume()",
            "interrupted_looks_at_one_sample_and_mixes",
        ),
        (
            "The loss of a first call, whose backward runs after that of a second one, mixes samples.",
            "for node in nodes if mode.waiting else ():",
            "for node in ():",
            "interrupted_loss_before_a_call_and_mixes",
        ),
        (
            "An attack that mixes samples moves the inputs of the second call of a loss.",
            "if mode.is_earlier or mode in self._modes:",
            "if mode.is_earlier:",
            "interrupted_attacked_beside_a_clean_call_and_mixes",
        ),
        (
            "After a refused step the same program's steps are checked as seldom as before.",
            "        self._step, self._new_at = 1, 0\n        self._outputs.clear()",
            "        self._outputs.clear()",
            "integration/flash_clip_refusals::steps_after_a_refused_one",
        ),
        (
            "What was computed from the call before the last one, of another number of samples, is not followed.",
            "self._modes.append(mode)",
            "self._modes = [mode]",
            "interrupted_second_call_of_fewer_and_mixes",
        ),
    ],
    "clipping/module/other_samples.py": [
        (
            "A loss of a step may depend on what other samples have left in the step before.",
            "if not self.values.stay or not self.values.depends(gradient):",
            "if True:",
            ("left_queue", "left_center", "left_mean_loss_as_a_number"),
        ),
        (
            "A mean of earlier losses that the loop has read divides later ones.",
            "elif not self.is_over and earlier.repeats(x, earlier):",
            "elif False:",
            ("left_mean_loss_as_a_number", "left_moving_number"),
        ),
        (
            "Samples are mixed in tensors that wrap other ones.",
            "if any(map(dispatches, types)):",
            "if False:",
            ("tensors_wrapper_mixing", "tensors_wrapped_labels_mixing", "tensors_jagged_mixing"),
        ),
        (
            "The labels of other samples change the loss of a sample.",
            "if is_constant or len(x) != self.batch",
            "if True or len(x) != self.batch",
            ("labels_of_valid", "labels_balanced", "labels_mixed_targets"),
        ),
        (
            "An attack moves inputs by the mean of the gradients that a backward has left.",
            "            if gradient is not None and has_rows(gradient):\n",
            "            if False:\n",
            ("interrupted_attacked_and_mixes", "interrupted_attacked_twice_and_mixes", "left_gradients_of_inputs"),
        ),
        (
            "What a generator has made of noise is refused as an input once it was detached beside another call.",
            "if not self.values.depends(x) or self.values.is_label(x):",
            "if not self.values.depends(x):",
            ("left_generator", "left_small_generator"),
        ),
    ],
    "clipping/forwards/state.py": [
        (
            "A loss of a class of tensors of the program's own may mix samples.",
            "is_plain = isinstance(x, torch.Tensor) and",
            "is_plain = type(x) is torch.Tensor and",
            ("tensors_own_class_mixing", "tensors_mixing_class_mixing"),
        ),
        (
            "Other samples with the same first input, such as a prompt, are taken for samples that were given twice.",
            "            self._tensors, others._tensors, strict=True\n",
            "            self._tensors[:1], others._tensors[:1], strict=True\n",
            "batches_that_share_one_input",
        ),
        (
            "A sample that is given again after another backward pass contributes twice.",
            "        known += own\n",
            "        known = own\n",
            "batches_given_again_later",
        ),
        (
            "The forwards of a proof change buffers.",
            "                    x[...] = old",
            "                    pass",
            ("mix_after_step_3", "hook_spectral_norm", "hook_old_spectral_norm"),
        ),
        (
            "The forwards of a proof change attributes.",
            "                    del d[key]\n                d.update(saved)",
            "                    del d[key]",
            "modes_own_count_of_calls",
        ),
        (
            "The forwards of a proof change lists.",
            "                value.update(copy) if isinstance(value, set) else value.extend(copy)",
            "                pass",
            "modes_own_list_of_calls",
        ),
        (
            "The forwards of a proof register other tensors as buffers.",
            "        self._dicts = [(m._buffers, dict(m._buffers)) for m in modules]\n",
            "        self._dicts = []\n",
            "integration/flash_clip_module::proofs_leave_what_a_forward_writes[registered anew]",
        ),
        (
            "The forwards of a proof change objects that attributes hold.",
            "    return type(value) is SimpleNamespace or _package(value) == package\n",
            "    return type(value) is SimpleNamespace\n",
            "integration/flash_clip_module::proofs_leave_what_a_forward_writes[object]",
        ),
        (
            "The forwards of a proof change collections inside of collections.",
            "            waiting += [(item, package) for item in items]\n",
            "            pass\n",
            "integration/flash_clip_module::proofs_leave_what_a_forward_writes[dict of lists]",
        ),
        (
            "The forwards of a proof draw NumPy's random numbers.",
            "            numpy.set_state(of_numpy)",
            "            pass",
            "chance_numpy_scales_output",
        ),
        (
            "The forwards of a proof draw Python's random numbers.",
            "        random.setstate(python)",
            "        pass",
            "chance_python_scales_output",
        ),
        (
            "A model that registers hooks in its first forward has them several times, and returns other outputs.",
            "        self._restore_hooks()\n",
            "",
            "carried_hooks_of_the_first_forward",
        ),
    ],
    "clipping/module/other_values.py": [
        (
            "Samples are mixed in sparse, nested or quantized tensors.",
            "return has_values(x) and key_of(x) in self._others",
            "return has_storage(x) and key_of(x) in self._others",
            ("tensors_sparse_mixing", "tensors_nested_mixing", "tensors_quantized_mixing"),
        ),
        (
            "A head with an optimizer that is not private learns from all samples.",
            "        if self.depends(x):\n            self._given.discard(key_of(x))",
            "        pass",
            ("left_public_head", "left_learned_centers"),
        ),
    ],
    "clipping/proof/summary.py": [
        (
            "The labels of all samples are counted before the model is called, and divide the loss.",
            "if len(counts) < total and is_new",
            "if False",
            ("counted_before_inside_tensor_refused", "counted_before_outside_number_refused"),
        ),
        (
            "A loss is refused that is divided by a constant, because a batch has as many labels by chance.",
            "total in self._divisors and total not in self._constants",
            "total in self._divisors",
            "counted_by_chance_as_a_constant",
        ),
        (
            "A target that a sample has left for itself is refused.",
            "[each is None for each in known]",
            "[True for each in known]",
            "left_own_bank_reordered",
        ),
        (
            "Numbers of rows that a program has made before the call are taken for labels, and its loss is refused.",
            "2 < x.numel() == len(x) and not bool(x.flatten().diff(n=2).any())",
            "False",
            "labels_rows_before_the_call",
        ),
        (
            "A table that the program changes in its place is taken for labels, and its loss is refused.",
            "return is_kept or self._mark(x) in self._marks",
            "return self._mark(x) in self._marks",
            "labels_moving_table",
        ),
        (
            "Samples are exchanged for others in one direction alone.",
            "for v in (0, 1)]",
            "for v in (0,)]",
            "single_output_of_0",
        ),
        (
            "Samples whose indices differ in the highest digit alone are not told apart.",
            "(batch - 1).bit_length()",
            "(batch - 1).bit_length() - 1",
            "single_output_of_8",
        ),
        (
            "What differs counts as equal.",
            "relative_differences(self.projections - other.projections, self.norms, self.bits == other.bits)",
            "relative_differences(self.projections - other.projections, self.norms, self.bits != other.bits)",
            "single_output_of_later",
        ),
        (
            "Distances of samples are zero.",
            "projections += ((values @ vectors",
            "projections += 0 * ((values @ vectors",
            "single_output_of_later",
        ),
    ],
    "clipping/module/hooks.py": [
        (
            "Where a checkpoint runs the model again in backward, that counts as another call.",
            "(module is not self.registry.model or is_recomputed())",
            "module is not self.registry.model",
            "checkpoint_around_the_model_clean_not_reentrant",
        ),
        (
            "The mean of the norms of the step before weighs the losses.",
            "        self._parts.add_samples(self.bookkeeping.norms)\n",
            "",
            "integration/flash_clip_refusals::norms_of_the_step_before_cannot_weigh_losses",
        ),
        (
            "A private model that learns through another private one, after its step, is refused.",
            "        self._parts.pause_all()\n",
            "        self._parts.pause()\n",
            "interrupted_learn_through_another",
        ),
        (
            "A call that raises an error comes between another call and its loss, which mixes samples.",
            "        if output is None or not self.hooks_enabled:\n            self._parts.resume()",
            "        if output is None or not self.hooks_enabled:",
            "interrupted_fails_and_mixes",
        ),
        (
            "After a step that its outputs do not explain, the same program's next step is accepted.",
            "self.situations.known.clear()  # otherwise",
            "pass  # otherwise",
            "integration/flash_clip_refusals::steps_after_a_refused_one",
        ),
        (
            "A loss of the batch's mean output is accepted.",
            "if where is None and x.numel() > 1 and hooks.batch:",
            "if where is None and x.numel() < 1 and hooks.batch:",
            "outputs_without_samples",
        ),
        (
            "A program mixes samples between two parts of the model that it calls by themselves.",
            "            self._parts.check_gradients(call, hooks.batch)",
            "            pass",
            "parts_mixed_in_a_mode",
        ),
        (
            "A model is made private twice, and a layer's gradient is taken twice.",
            "        refuse_private(inner_model(m))\n",
            "",
            ("loop_private_twice", "loop_private_after_hooks"),
        ),
    ],
    "clipping/module/read_numbers.py": [
        (
            "A mean that NumPy computes from the losses of a batch divides them.",
            "            mode.note_read(x)",
            "            pass",
            ("outside_mean_of_an_array", "outside_center", "outside_list_under_a_mode"),
        ),
        (
            "A mean of the step before, which is nearly a number of four digits, scales the loss.",
            "abs(short - x) > 1e-14 * abs(x)",
            "abs(short - x) > 1e-6 * abs(x)",
            "integration/flash_clip_refusals::a_mean_of_the_step_before_scales_the_loss",
        ),
        (
            "A mean of few digits, the first that the program reads, scales the inputs of the next call.",
            'if not frame.f_globals.get("__name__", "").startswith(_CLIPPING):',
            "if True:",
            "integration/flash_clip_refusals::a_mean_that_is_read_scales_the_next_call[torch.float64-0.375]",
        ),
        (
            "What a program computes from the losses by functions that are not known again scales them.",
            "if earlier is None or self.before is None or torch",
            "if True or torch",
            ("outside_line", "outside_ranks"),
        ),
    ],
    "clipping/proof/batches.py": [
        (
            "A hook on the model's output that scales its gradient is refused, and one that mixes samples is not seen.",
            "if leaf is x)] = _Alias.apply(alias)",
            "if leaf is x)] = alias",
            ("outside_hook", "outside_hook_that_scales"),
        ),
        (
            "Losses of probabilities are not computed again.",
            "GENTLE[0] if self._in_range else",
            "GENTLE[0] if False else",
            "between_loss_of_probabilities",
        ),
        (
            "The other samples keep their values, too.",
            "return torch.where(keep, x.detach(), other)",
            "return torch.where(keep, x.detach(), x.detach())",
            "single_output_of_later",
        ),
        (
            "Python's random numbers hide that outputs depend on the number of samples.",
            "for name in _PYTHON_DRAWS:",
            "for name in ():",
            "chance_by_size_python",
        ),
        (
            "NumPy's random numbers hide that outputs depend on the number of samples.",
            "for name in _NUMPY_DRAWS if numpy is not None else ():",
            "for name in ():",
            "chance_by_size_numpy",
        ),
    ],
    "clipping/optimizers/optimizer.py": [
        (
            "A queue of outputs that is filled after the step is not seen.",
            "            self._module.end_step()\n",
            "            pass\n",
            "left_queue_after_the_step",
        ),
    ],
    "clipping/proof/recorder.py": [
        (
            "A backward in float32 may mix samples by half a percent.",
            "kept, no_leak, may_jump)",
            "kept, no_leak, True)",
            "precision_scales_by_batch",
        ),
        (
            "An output that depends on other samples is accepted.",
            "if a.shape[1:] != b.shape[1:] or far_apart(a, b, kept):",
            "if a.shape[1:] != b.shape[1:]:",
            "single_output_of_later",
        ),
        (
            "A layer whose input depends on other samples is accepted.",
            "if any(far_apart(x, y, kept) for x, y in zip(a.inputs, b.inputs, strict=False)):",
            "if any(far_apart(x, y, kept) for x, y in ()):",
            "single_input_of_later",
        ),
        (
            "A layer whose output gradient depends on other samples is accepted.",
            "if any(far_apart(x, y, kept, may_jump) for x, y in zip(a.gradients, b.gradients, strict=False)):",
            "if any(far_apart(x, y, kept, may_jump) for x, y in ()):",
            "precision_rounds_anew_and_mixes",
        ),
        (
            "Weak mixing hides below the tolerance.",
            "return max(_TOLERANCES.get(each, 2e-5) for each in dtypes)",
            "return 1e6 * max(_TOLERANCES.get(each, 2e-5) for each in dtypes)",
            "single_output_of_later_weakly",
        ),
        (
            "Layers behind kernels that round otherwise in every run are repeated, or the model is refused.",
            "        self.is_measured = True\n        for other in (again() for _ in range(_MEASURED)):",
            "        self.is_measured = True\n        for other in ():",
            "integration/flash_clip_module::rounding_that_is_new_in_each_run_repeats_no_module",
        ),
        (
            "Weak mixing hides below rounding that is measured.",
            "_MORE * (min(a.rounding, tolerance)",
            "1e4 * (min(a.rounding, tolerance)",
            "precision_rounds_anew_and_mixes",
        ),
        (
            "A loss inside of the model that depends on samples' places is accepted.",
            "is_kept = len(places) == self.batch or",
            "is_kept =",
            "transform_labelled_by_place",
        ),
    ],
    "clipping/bookkeeping/__init__.py": [
        (
            "A sample that two backward passes of a step were given contributes twice.",
            "check_given_once(map(self._given_to, self._passes), self._counted)",
            "pass",
            ("batches_given_twice", "batches_that_share_a_sample"),
        ),
    ],
    "clipping/proof/program.py": [
        (
            "The compared samples are the ones that change.",
            "new = perturbed(leaves, self.program.batch, kept, kind, seed)",
            "new = perturbed(leaves, self.program.batch, ~kept, kind, seed)",
            "kind_linear",
        ),
        (
            "The forwards of a proof draw the training's random numbers.",
            "with program.random.restored(), restoring_state(program.module) as state, torch.enable_grad():",
            "with restoring_state(program.module) as state, torch.enable_grad():",
            ("chance_plain_dropout", "chance_gumbel"),
        ),
        (
            "The forwards of a proof change buffers and attributes of the model.",
            "restoring_state(program.module) as state",
            "restoring_state(nn.Module()) as state",
            "carried_counter",
        ),
    ],
    "clipping/proof/situations.py": [
        (
            "A layer whose gradient is not autograd's is accepted.",
            "doubts = [] if self.units.is_sharded else real.sums()",
            "doubts = []",
            "hook_forward_replaced_slightly",
        ),
        (
            "Layers that get something else when other samples change are accepted.",
            "        doubts = prover.mixing(runs_jointly=self.agreement is not None)",
            "        doubts = prover.mixing(runs_jointly=self.agreement is not None)[:0]",
            "single_input_of_later",
        ),
        (
            "Layers that are in doubt are accepted.",
            "                if not doubts:",
            "                if True:",
            "hook_forward_replaced_clamps",
        ),
        (
            "Rows that data moves are counted to the samples that had them in the first batch.",
            "for module, inside in modules_that_move_rows(probe):",
            "for module, inside in ():",
            "rows_sorted_by_sentinel",
        ),
    ],
    "clipping/proof/by_hand.py": [
        (
            "Gradients that are off by less than themselves are accepted.",
            "elif error > precision(dtype, parameter) * norm",
            "elif error > 1e6 * precision(dtype, parameter) * norm",
            "hook_forward_replaced_slightly",
        ),
    ],
    "clipping/proof/row_moves.py": [
        (
            "A model that needs its samples sorted by length fails with its own error in the proof.",
            "        raise CannotRunError from error\n",
            "        raise\n",
            "rows_packed_by_sentinel",
        ),
        (
            "Rows that scatter moves are not noticed.",
            "if packet in (_aten.scatter, _aten.scatter_, _aten.scatter_add,",
            "if packet in (_aten.scatter_, _aten.scatter_add,",
            "rows_scattered_by_sentinel",
        ),
        (
            "Rows that are picked with an index are not noticed.",
            "if packet in (_aten.index, _aten.index_put,",
            "if packet in (_aten.index_put,",
            "rows_sorted_by_sentinel",
        ),
        (
            "Rows that are picked by index_select or gather are not noticed.",
            "if packet in (_aten.index_select, _aten.gather, _aten.index_add,",
            "if packet in (_aten.index_add,",
            "rows_selected_by_sentinel",
        ),
    ],
    "clipping/proof/explanation.py": [
        (
            "Gradients that the outputs do not explain are accepted.",
            "    if wrong:\n        written",
            "    if False:\n        written",
            ("outputs_aux_sums", "outputs_aux_in_list"),
        ),
        (
            "Models with dropout are refused, since their step is explained with another mask.",
            "                self.random.restored(),\n                torch.enable_grad(),\n                self.surr",
            "                torch.enable_grad(),\n                self.surr",
            "chance_plain_dropout",
        ),
        (
            "Steps of two passes are refused, whose sums are clipped already.",
            "torch.ones(each.batch_size) if each.factors is None else each.factors.detach()",
            "torch.ones(each.batch_size)",
            "kind_linear_two_passes",
        ),
    ],
    "clipping/proof/sample_forwards.py": [
        (
            "A module that has drawn the same numbers by chance is repeated with other ones.",
            "draws = began.random is not None and began.random.has_moved()",
            "draws = False",
            ("chance_depth_row_0.05", "chance_dropout_0.01", "chance_python_skips_0.05", "chance_depth_batch_0.1"),
        ),
        (
            "A model with boxes gets boxes of negative widths, and is refused.",
            "        along = 0 if leaf.dim() > 2 and leaf.shape[1] > 1 and not leaf.is_floating_point() else -1\n",
            "        along = -1\n",
            "arguments_intervals",
        ),
    ],
    "clipping/proof/probe.py": [
        (
            "The second argument of a layer is ignored.",
            "if any(len(each.inputs) > 1 for of_forward in calls for each in of_forward):",
            "if any(len(each.inputs) > 9 for of_forward in calls for each in of_forward):",
            ("gate_rms_norm_unchecked", "gate_linear_keyword_unchecked"),
        ),
        (
            "A parameter that is used beside its layer is not noticed before the step.",
            "unsuitable = [layer for layer in layers if any(id(p) in used for p in layer.seen_parameters())]",
            "unsuitable = []",
            (
                "subclass_uses_weight_twice",
                "kind_lora_raw",
                "kind_tied_linears",
                "subclass_standardized_conv",
                "integration/flash_clip_modules::modules_are_clipped_as_by_hand",
            ),
        ),
    ],
    "clipping/proof/model_state.py": [
        (
            "What a hook on the model makes of its output is not proved.",
            "        output = output if changed is None else changed",
            "        output = output",
            "single_hook",
        ),
        (
            "A forward changes a weight by its data.",
            "self._refuse_parameters(written_leaves(func, args, kwargs))",
            "pass",
            "carried_weight_written",
        ),
    ],
    "clipping/module/attached_hooks.py": [
        (
            "The gradient of what a hook makes of a layer's output is taken for the layer's.",
            "always_call=True, prepend=_is_tapped_first(module)",
            "always_call=True, prepend=False",
            "hook_scales_output_unchecked",
        ),
    ],
    "clipping/proof/prover.py": [
        (
            "A model that subtracts the mean of the batch before is accepted.",
            "if not self.changes_state:\n            return",
            "if self.changes_state or not self.changes_state:\n            return",
            "carried_earlier_mean",
        ),
        (
            "A checkpoint has statistics of the data.",
            'return buffers + [("", x.detach()) for x in outputs]',
            'return [("", x.detach()) for x in outputs]',
            "carried_observer",
        ),
        (
            "Samples that mix only where a seldom number is drawn are accepted.",
            "for share in (MIDDLE, LOWEST, HIGHEST) if base.draws",
            "for share in (MIDDLE,) if base.draws",
            ("chance_mixes_seldom", "chance_mixes_numpy"),
        ),
        (
            "What a sample's place in the batch changes is not seen.",
            "[first[::-1], first]",
            "[first]",
            "transform_halved_by_place",
        ),
    ],
    "clipping/module/call_proofs.py": [
        (
            "A number in a file that changes goes unnoticed.",
            "if call.has_new_operations and not call.is_proved:",
            "if call.has_new_operations and call.is_proved:",
            "anywhere_file",
        ),
        (
            "Two numbers that are swapped go unnoticed.",
            "call.operations.end(not call.situation.draws)",
            "call.operations.end(False)",
            "anywhere_swapped",
        ),
    ],
}
