# SPDX-License-Identifier: Apache-2.0
"""Faults in what a proof holds for: a change of the program after which a step is not proved again."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/forwards/repetition.py": [
        (
            "The modes of a model that garbage collection frees are left in the midst of a move of others.",
            "    gc.disable()\n",
            "",
            "unit/following_modes",
        ),
        (
            "A model under a mode that changes each sample alone is refused.",
            "        if now != self:\n            now._exchange(self)\n",
            "",
            "integration/flash_clip_refusals::modes_that_change_each_sample_alone",
        ),
        (
            "A proof runs a forward that leaves a mode on as if it did not.",
            "        if left != self:\n",
            "        if False and left != self:\n",
            "graph__Dispatch_stays",
        ),
        (
            "A forward that runs in a thread of its own ends backward with an error of Python's.",
            "            if mode.old_dispatch_mode_flags:",
            "            if True:",
            "outside_called_in_a_thread",
        ),
    ],
    "clipping/module/read_numbers.py": [
        (
            "A mode that has ended while nothing was followed stays on.",
            "if not (isinstance(mode, FollowingMode) and mode.stays_off)",
            "if True",
            "unit/following_modes",
        ),
        (
            "A loss in which the index of the hardest sample is an index is accepted.",
            "            if near is not None and near[0] == x:",
            "            if False:",
            ("outside_hardest_by_its_index", "outside_class_by_its_index"),
        ),
        (
            "A loss of the numbers up to an index of the batch is accepted.",
            "            self._assigned.setdefault(frame.f_code, {})[variable] = number, others",
            "            pass",
            ("outside_end_by_an_index", "outside_number_of_hard_ones"),
        ),
        (
            "A clean loss is refused: an integer of one sample counts as that of the sample before.",
            '            assigned.pop(_target(frame) or "", None)',
            "            pass",
            "outside_parts_by_label",
        ),
    ],
    "clipping/module/graph_hooks.py": [
        (
            "A loss of the same graph that detached values of other samples enter is not checked before its schedule.",
            "    if any(are_new):",
            "    if False:",
            ("graph_divisor_operation_late", "graph_divisor_number_late"),
        ),
        (
            "A loss of one model that is computed after a call of another one is not checked before its schedule.",
            "        for owner in owners:\n            owner.note_new()\n",
            "        max(owners, key=lambda owner: owner._begin).note_new()\n",
            "graph_divisor_before_another_model_late",
        ),
        (
            "What a loss does in a step that is not checked counts as checked from then on.",
            "        if self._graphs and self._graphs[-1].is_followed:\n            self._operations.learn()",
            "        self._operations.learn()",
            "graph_divisor_again_late",
        ),
        (
            "autograd.grad of an output from which another one is computed fails in checked steps.",
            "if x.grad_fn is not None and x.grad_fn in graph_nodes(",
            "if x.grad_fn is None and x.grad_fn in graph_nodes(",
            ("graph_weighted_by_gradient", "graph_kept_gradient"),
        ),
        (
            "A term that reaches an output beside it, from which another output is computed, is not noticed.",
            "        if _number_of(node) < self._end:\n            return []\n",
            "",
            "graph_beside_features",
        ),
        (
            "A loss that uses an output twice is refused where another output is computed from it.",
            "self.gradient = gradient if self.gradient is None else self.gradient + gradient",
            "self.gradient = gradient",
            "graph_weighted_by_gradient",
        ),
        (
            "Neither a term beside the outputs nor a mixing loss that begins between two checks is noticed.",
            "        _check_losses(roots, gradients)\n",
            "        pass\n",
            "graph_loss_centered_late",
        ),
        (
            "A term of the loss from an attribute is accepted if the loss from the outputs is known.",
            "        if graph.beside:\n            return False\n",
            "",
            "graph_balance_gets_weight",
        ),
        (
            "A hook on an output that begins to mix samples between two checks is not noticed.",
            "self.bookkeeping.loss_mixes |= far_apart(x, y, kept)",
            "pass",
            "graph_output_mixes_late",
        ),
        (
            "A hook on a tensor inside of the model that begins between two checks is not noticed.",
            "    return on_tensor(self, _watched(hook, self))",
            "    return on_tensor(self, hook)",
            "graph_attribute_mixes_late",
        ),
        (
            "A hook on a node of the model's graph that begins between two checks is not noticed.",
            "on_node(hooks, _watched(hook, None))",
            "on_node(hooks, hook)",
            "graph_node_mixes_late",
        ),
        (
            "A hook that writes to a gradient, and returns nothing, is not noticed.",
            "changed = [x._version for x in given] != versions",
            "changed = False",
            "graph_in_place_mixes_late",
        ),
    ],
    "clipping/module/attached_hooks.py": [
        (
            "Layers in a part that torch.compile has compiled for another model are not seen.",
            "if len(self.handles) > count and any(map(_is_compiled, registry.model.modules())):",
            "if len(self.handles) > count and False:",
            "graph_compiled_part",
        ),
        (
            "A forward that raises leaves parameters that are not trained.",
            "always_call=True, prepend=_is_tapped_first(module)",
            "always_call=False, prepend=_is_tapped_first(module)",
            "integration/flash_clip_refusals::parameters_stay_trainable_when_a_forward_fails",
        ),
    ],
    "clipping/module/call_proofs.py": [
        (
            "Layers that exchange their weights between forward and backward get each other's gradients.",
            "if self._state.structure()[:3] != self._structure[:3]:",
            "if False and self._state.structure()[:3] != self._structure[:3]:",
            "between_exchanged_weights",
        ),
        (
            "Saved-tensor hooks that mix samples in some steps only are not noticed.",
            "or bool(call.modes) or is_own",
            "or bool(call.modes)",
            "graph_rounds_saved_by_tensor_late",
        ),
        (
            "A mode that begins to mix gradients between two checks is not noticed.",
            "or bool(call.modes) or is_own",
            "or is_own",
            "integration/flash_clip_refusals::a_dispatch_mode_around_a_step",
        ),
        (
            "A program that empties the model before the first calls alone carries data of samples on.",
            "if not all(each.is_empty() for each in known.emptied):",
            "if False:",
            "left_emptied_deeply_twice",
        ),
        (
            "A model that mixes in another mode is not proved again.",
            "call.key = call.entry, self._modes, signature,",
            "call.key = call.entry, (), signature,",
            "number_of_flag_mixes",
        ),
        (
            "Arguments of another kind are not proved.",
            "call.key = call.entry, self._modes, signature,",
            "call.key = call.entry, self._modes, None,",
            "number_of_dtype_mixes",
        ),
        (
            "A batch that is larger than any before is not proved.",
            "signature, size_class(batch), context_key",
            "signature, 0, context_key",
            "number_of_batch_size_mixes",
        ),
        (
            "A step under autocast is not proved after one without.",
            'size_class(batch), context_key(call.modes, ("cpu", "cuda"))',
            "size_class(batch), ()",
            "number_of_autocast_mixes",
        ),
        (
            "A forward that calls its layers in another order is not proved.",
            "order_of(hooks.trace) not in situation.traces",
            "not situation.traces",
            "number_of_order_of_layers_mixes",
        ),
        (
            "An empty batch is proved, which shows nothing.",
            "elif call.key not in self.situations.known and batch and random is not None:",
            "elif call.key not in self.situations.known and random is not None:",
            "batches_empty",
        ),
        (
            "A frozen BatchNorm that train() switches on is refused without its name.",
            "        check_model(self.registry.model)\n",
            "",
            "integration/flash_clip_refusals::a_batch_norm_that_is_switched_on_again",
        ),
        (
            "A forward that computes by operations which no proof has seen is accepted.",
            "if situation.patterns.issuperset(patterns):",
            "if True:",
            "hidden_environment_mixes_later",
        ),
        (
            "An empty batch after a change runs the layers of before.",
            "        self.hooks.layouts, self.hooks.plain = {}, {}",
            "        pass",
            "middle_empty_after_freeze",
        ),
    ],
    "clipping/proof/explanation.py": [
        (
            "A scale that the program has taken from the batch mixes samples in saved-tensor hooks.",
            "    values += [function.__globals__.get(name) for name in names]\n",
            "",
            "graph_rounds_saved_by_batch",
        ),
    ],
    "clipping/module/other_samples.py": [
        (
            "A loss in float64 of which a part is added up in float32 is refused.",
            "            rounding += min(self._rounding, _SAME_SUM[torch.float32])\n",
            "            pass\n",
            "graph_smoothed_in_float32",
        ),
        (
            "A forward reads what the loop has computed from the outputs of the step before.",
            "            return self.values.other(x, self.values.plans - 1) if self.has_left(x, given) else None\n",
            "            return None\n",
            ("left_held_mean", "left_in_a_hook"),
        ),
    ],
    "clipping/module/calls.py": [
        (
            "A mode around backward alone is not noticed where it begins between two checks.",
            "        if modes is not None and not",
            "        if False and not",
            "integration/flash_clip_refusals::a_dispatch_mode_around_backward_alone",
        ),
    ],
    "clipping/proof/loss_graph.py": [
        (
            "A term of the loss from an attribute is taken for one without a gradient.",
            "if g is not None and bool(g.any())), None)",
            "if g is None), None)",
            "graph_balance_begins",
        ),
        (
            "A term of the loss from an attribute is refused although its weight is zero.",
            "if g is not None and bool(g.any())), None)",
            "if g is not None), None)",
            "graph_balance_has_no_weight",
        ),
        (
            "A softmax over the samples is taken for one over classes.",
            "(node, name) for name in names]",
            "(node, name) for name in ()]",
            "graph_loss_turns_to_samples",
        ),
        (
            "No new loss has second derivatives by two samples.",
            "if bool((others.isfinite() & (others != 0)).any()):",
            "if False:",
            "graph_loss_contrastive_late",
        ),
        (
            "A loss that is not linear is taken for one that mixes samples.",
            "where.by_sample(g, batch)[(kept == 0).to(g.device)]",
            "where.by_sample(g, batch)",
            "graph_loss_penalty_late",
        ),
        (
            "A new loss by a function without second derivatives is taken for a linear one.",
            "        if self.own_functions:\n",
            "        if False:\n",
            "graph_loss_once_late",
        ),
    ],
    "clipping/module/between_calls.py": [
        (
            "A loss that mixes samples by detached tensors is noticed many steps later.",
            "            self._new_at = self._step\n",
            "            pass\n",
            "integration/flash_clip_refusals::a_new_loss_with_detached_tensors_lasts_one_step",
        ),
        (
            "A forward reads a number of the step before from an attribute.",
            "if any(mode.has_left(d[key], given) for mode in modes):",
            "if False:",
            "left_held_number",
        ),
    ],
    "clipping/proof/program.py": [
        (
            "A forward reads statistics that a call without gradients has left in the model.",
            "                self._left = after.differences()\n",
            "",
            ("left_statistics", "left_before_in_attribute"),
        ),
        (
            "A mean loss that the loop writes into the model, and nobody reads, is refused.",
            "if len(outputs[0]) != len(outputs[1]) or not all(map(close, *outputs)):",
            "if True:",
            ("left_logged", "left_before_in_log"),
        ),
    ],
    "clipping/proof/model_state.py": [
        (
            "Checked steps update the statistics of another model's BatchNorm several times.",
            "return [x for x in args[3:5] if x is not None] if is_update else []",
            "return []",
            "left_statistics_of_another",
        ),
        (
            "Arguments of another dtype are not proved.",
            "described.append((sizes, leaf.dtype, leaf.requires_grad))",
            "described.append((sizes, leaf.requires_grad))",
            "number_of_dtype_mixes",
        ),
        (
            "Arguments of other shapes are not proved.",
            "described.append((sizes, leaf.dtype, leaf.requires_grad))",
            "described.append((leaf.dtype, leaf.requires_grad))",
            "number_of_dimensions_mixes",
        ),
        (
            "A flag or a word among the arguments is not proved when it changes.",
            "            return leaf\n        if not isinstance(leaf, (int, float)):",
            "            return None\n        if not isinstance(leaf, (int, float)):",
            "unit/proof_summary::flags_and_words_make_other_kinds_of_calls",
        ),
        (
            "A model is not proved again after train() or eval() of a part.",
            "            tuple(map(_is_training, self._modules)),\n",
            "            (),\n",
            "number_of_mode_of_part_mixes",
        ),
        (
            "A hook that the program adds later is not proved.",
            "            self._hooks_of_users(),\n",
            "            (),\n",
            "number_of_hook_mixes",
        ),
        (
            "A forward that is replaced later is not proved.",
            "            replaced,\n",
            "            (),\n",
            "number_of_forward_mixes",
        ),
        (
            "A module that becomes one of another class is not proved.",
            "classes = tuple(map(type, self._modules))",
            "classes = ()",
            "number_of_class_mixes",
        ),
        (
            "A flag of the model's own is not proved when it changes.",
            "            self._attributes.now(self._users_hooks),\n",
            "            (),\n",
            "number_of_flag_mixes",
        ),
        (
            "A parameter that is trained later has no layer.",
            "tuple(map(id, held)), tuple(map(_is_trained, held))",
            "tuple(map(id, held)), ()",
            ("changes_unfrozen", "changes_frozen"),
        ),
        (
            "A module that is put in later is not followed.",
            "return self._child_tokens, names, tuple(map(id, held))",
            "return (), names, tuple(map(id, held))",
            "number_of_child_mixes",
        ),
        (
            "A parameter that gets another name is looked for by the one before.",
            "names = tuple(chain.from_iterable(self._parameters))",
            "names = ()",
            "changes_pruning_ends",
        ),
        (
            "A hook at the address of a freed one is taken for it.",
            "if known is not None and known[0]() is held:",
            "if known is not None:",
            "unit/model_values::another_object_at_the_same_address_is_another",
        ),
    ],
    "clipping/optimizers/optimizer.py": [
        (
            "A mode of the program changes the clipped sums and the noise.",
            "            with Modes().restored():",
            "            if True:",
            "integration/flash_clip_refusals::modes_that_change_each_sample_alone",
        ),
    ],
    "clipping/layers/registry.py": [
        (
            "A frozen BatchNorm is refused for its type.",
            "            and is_torchs\n",
            "",
            "modes_batch_norm_of_own_forward_frozen",
        ),
        (
            "A parametrized weight is that of an earlier call, and its refusal names mixing instead.",
            "if parametrize._cache_enabled and any(",
            "if False and any(",
            "changes_cached_from_step_2",
        ),
        (
            "BatchNorm is refused by the proof of the first step instead of make_private.",
            "and (mixes or (isinstance(module, _InstanceNorm)",
            "and (False or (isinstance(module, _InstanceNorm)",
            "integration/flash_clip_refusals::models_are_refused_by_name",
        ),
        (
            "An embedding whose gradients depend on the batch is accepted.",
            "            _refuse_embedding_options(module, name)",
            "            pass",
            "integration/flash_clip_refusals::models_are_refused_by_name",
        ),
    ],
    "clipping/proof/model_values.py": [
        (
            "A number outside of the model's modules that makes samples mix is not seen.",
            "return self._now, self.tensors.now()",
            "return self.tensors.now()",
            ("hidden_global_number_mixes_later", "hidden_configuration_number_mixes_later"),
        ),
        (
            "A buffer that makes samples mix is not seen when it changes.",
            "return self._now, self.tensors.now()",
            "return self._now, ()",
            ("number_of_buffer_mixes", "number_of_tensor_mixes"),
        ),
        (
            "Another tensor in the place of a large buffer is taken for the same one.",
            "return self._tensor() is other._tensor() is not None",
            "return True",
            "number_of_replaced_matrix_mixes",
        ),
        (
            "A write to a large buffer is not seen.",
            "self._version != other._version",
            "False",
            "number_of_matrix_mixes",
        ),
        (
            "A configuration at the address of a freed one is taken for it.",
            "self._kept = [d.get(k) for d, k in self._others.places]",
            "self._kept = []",
            "number_of_replaced_configuration_mixes",
        ),
    ],
    "clipping/proof/situations.py": [
        (
            "A check of a known situation does not see that samples have begun to mix.",
            "is_same = not is_mixing and not",
            "is_same = not",
            "hidden_unseen_number_mixes_at_a_check",
        ),
        (
            "Samples that a check has not drawn are missing in the proof that follows it.",
            "new = self.known[key] = self.prove(entry, args, kwargs, random)",
            "new = self.known[key] = self.prove(entry, some_args, some_kwargs, random)",
            "integration/flash_clip_module::a_check_that_fails_is_followed_by_a_proof",
        ),
    ],
    "clipping/proof/recorder.py": [
        (
            "A check of a known situation takes mixing for rounding.",
            "tolerances = torch.tensor([_tolerance(dtype, device) for",
            "tolerances = torch.tensor([1e12 * _tolerance(dtype, device) for",
            "hidden_unseen_number_mixes_at_a_check",
        ),
    ],
    "clipping/module/hooks.py": [
        (
            "A model that counts its forwards in a buffer is proved again in each of the first steps.",
            "            self._proofs.settle()\n",
            "            pass\n",
            "unit/model_values::a_change_by_the_forward_itself_is_no_change",
        ),
        (
            "A model that changes between two backward passes drops the gradients of the first one.",
            "            if self.bookkeeping.passes:\n                raise",
            "            if False:\n                raise",
            ("middle_freeze_between_backwards", "middle_add_frozen_between_backwards"),
        ),
        (
            "Reading a parametrized weight counts as a call of the model.",
            "self._proofs.is_frozen() or (module is not self.registry.model and has_parameters_alone(args, kwargs))",
            "self._proofs.is_frozen()",
            "middle_weight_norm_is_logged",
        ),
    ],
    "clipping/bookkeeping/__init__.py": [
        (
            "A parameter that earlier and later layers hold has two norms in a backward, and no cross term.",
            "if forward < self.first_forward:",
            "if forward < 0:",
            "middle_freeze_between_two_forwards",
        ),
    ],
    "clipping/arguments.py": [
        (
            "Gradients are divided by 0, or by a number that is not one.",
            "if not is_bound(size):",
            "if False:",
            ("middle_expecting_0", "middle_expecting_nan"),
        ),
    ],
    "clipping/optimizers/__init__.py": [
        (
            "Noise of adaptive clipping has no real standard deviation, and the step ends in a TypeError.",
            "if self.noise_multiplier >= 2 * self.unclipped_num_std:",
            "if False:",
            "middle_adaptive_noise_rises",
        ),
    ],
    "clipping/proof/sample_forwards.py": [
        (
            "A proof fails where infinities are in one of two compared tensors.",
            "if self.moderate is None or other.moderate is None:",
            "if False:",
            "middle_dropped_in_parts",
        ),
    ],
}
