# SPDX-License-Identifier: Apache-2.0
"""Faults in per-sample gradients, in their norms, and in clipped sums."""

from tests.planted_faults.fault import Texts

FAULTS: Texts = {
    "clipping/layers/shared.py": [
        (
            "The product of an embedding's and a head's gradient counts once instead of twice.",
            "norms = own + 2 * cross.total",
            "norms = own + cross.total",
            "kind_tied_large",
        ),
        (
            "The squared norms of tied layers are added up as if their gradients were orthogonal.",
            "            if len(merged) == 2:",
            "            if False:",
            "kind_tied_large",
        ),
        (
            "The cross term of tied layers counts the padding's row.",
            "ids = ids.masked_fill(ids == padding, -1)",
            "ids = ids.clone()",
            "kind_tied_large_padding",
        ),
        (
            "The cross term of tied layers takes padding for the first row.",
            "        factor *= has_row[n].unsqueeze(1)\n",
            "",
            "kind_tied_large_padding",
        ),
        (
            "Of the per-sample gradients of two uses only the last counts.",
            "self.stack.to(accumulation_dtype(stack.dtype)) + stack, True",
            "stack.to(accumulation_dtype(stack.dtype)), True",
            "integration/flash_clip_modules::modules_are_clipped_as_by_hand",
        ),
        (
            "The norm of a parameter that layers of different kinds use is that of one use.",
            "                total = part if total is None else total + part",
            "                total = part",
            "kind_tied_transposed_large",
        ),
        (
            "The clipped sum of a parameter that is used several times is that of one use.",
            "\n            total = part if total is None else total + part",
            "\n            total = part",
            "kind_tied_large",
        ),
    ],
    "clipping/layers/registry.py": [
        (
            "Layers that share a parameter are clipped as if each had its own.",
            "layer.is_shared |= len(layers) > 1",
            "layer.is_shared |= len(layers) > 2",
            "kind_tied",
        ),
    ],
    "clipping/layers/linear.py": [
        (
            "The gradient of a square weight is transposed.",
            "        return g, x\n",
            "        return x, g\n",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "The gradients of small Conv1D layers of transformers are those of a linear layer.",
            "linear_gradients_cpu(*self.outer(x, g), ",
            "linear_gradients_cpu(g, x, ",
            "unit/clipping_keep_functions::the_same_is_kept",
        ),
    ],
    "clipping/layers/recognition.py": [
        (
            "The gradient of a recognized linear layer is transposed.",
            "(LinearLayer, weight.mT), (TransposedLinearLayer, weight)",
            "(TransposedLinearLayer, weight.mT), (LinearLayer, weight)",
            "unit/clipping_recognition::recognized_layers_equal_plain_autograd",
        ),
        (
            "A layer that clamps far away is taken for a linear one.",
            "if func.overloadpacket.__name__ not in _SMOOTH:",
            "if func.overloadpacket.__name__ in ():",
            ("unit/clipping_recognition::other_layers_are_not_recognized", "subclass_clamps_far_away"),
        ),
        (
            "A layer that is normalized over the batch is taken for a scale.",
            "if shift.shape != x.shape or not scaled.any() or not _one_by_one(module, x):",
            "if shift.shape != x.shape or not scaled.any():",
            "unit/clipping_recognition::other_layers_are_not_recognized",
        ),
    ],
    "clipping/layers/normalization.py": [
        (
            "A layer that scales by one plus its weight has a gradient that is twice too large.",
            'values["weight"].fill_(self.unit)',
            'values["weight"].fill_(1)',
            "unit/clipping_recognition::recognized_layers_equal_plain_autograd",
        ),
        (
            "LayerNorm is repeated with the default eps.",
            "torch.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)",
            "torch.layer_norm(x, self.module.normalized_shape)",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "The gradients of small LayerNorms are found with the default eps.",
            "layer_norm_gradients_cpu(x, g, self.module.eps)",
            "layer_norm_gradients_cpu(x, g, 1e-5)",
            "kind_layer_norm_eps_unchecked",
        ),
        (
            "The kernel for LayerNorm and RMSNorm is called with RMSNorm's default eps.",
            "_FLOAT32_EPS if eps is None else eps",
            "_FLOAT32_EPS",
            "unit/clipping_keep_functions::the_same_is_kept",
        ),
        (
            "RMSNorm is repeated with the default eps.",
            "functional.rms_norm(x, list(self.module.normalized_shape), eps=self.module.eps)",
            "functional.rms_norm(x, list(self.module.normalized_shape))",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
    ],
    "clipping/layers/embedding.py": [
        (
            "The constant by which an embedding scales its output is left out.",
            "return super().keep(x, g * self.scale, workspace, norms)",
            "return super().keep(x, g, workspace, norms)",
            "unit/clipping_recognition::recognized_layers_equal_plain_autograd",
        ),
        (
            "The constant by which an embedding scales its output is left out of the second pass.",
            "return super().sums_of_backward(x, g * self.scale, factors, samples, workspace, first)",
            "return super().sums_of_backward(x, g, factors, samples, workspace, first)",
            "unit/clipping_recognition::recognized_layers_equal_plain_autograd",
        ),
        (
            "The row of padding gets a gradient.",
            "            total[self.module.padding_idx] = 0",
            "            total[self.module.padding_idx] *= 1",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "The norm counts the row of padding.",
            "squares[slots] *= ~padding",
            "squares[slots] *= 1",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "The row of padding has per-sample gradients, where these are formed.",
            "            stack[:, self.module.padding_idx] = 0",
            "            stack[:, self.module.padding_idx] *= 1",
            (
                "integration/flash_clip_modules::modules_are_clipped_as_by_hand",
                "unit/clipping_layers::layer_equals_plain_autograd",
            ),
        ),
        (
            "The norm of a sample's equal ids is found as if they were different rows.",
            "new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]",
            "new[:, 1:] = 1",
            ("kind_embedding", "mix_ids_of_one_token", "unit/clipping_layers::layer_equals_plain_autograd"),
        ),
        (
            "The norms of small embeddings include the row of the padding.",
            "width), self.module.padding_idx)",
            "width), None)",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
    ],
    "clipping/layers/convolution.py": [
        (
            "The norms of a grouped convolution are added up over samples.",
            "norms.view(-1, size.groups).sum(1)",
            "norms.view(size.groups, -1).sum(0)",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "Circular padding is taken for zeros.",
            'if module.padding_mode != "zeros" and any(pads):',
            "if False:",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
        (
            "Stride and dilation are exchanged.",
            "module.stride, module.dilation)",
            "module.dilation, module.stride)",
            "unit/clipping_layers::layer_equals_plain_autograd",
        ),
    ],
    "clipping/layers/generic.py": [
        (
            "Imaginary parts of gradients are dropped.",
            "torch.view_as_real(part) if part.is_complex() else part",
            "part.real if part.is_complex() else part",
            "complex_parameter",
        ),
        (
            "In the second pass only the last samples that fit into the workspace count.",
            "found[parameter].add_(total) if parameter in found else total",
            "total",
            ("unit/clipping_layers", "integration/flash_clip_modules::modules_are_clipped_as_by_hand"),
        ),
    ],
    "clipping/kernels/sums.py": [
        (
            "A batch of one sample is not clipped.",
            "return single.mul_(factors.to(single.dtype))",
            "return single",
            ("batches_of_one", "unit/clipping_layers::layer_equals_plain_autograd"),
        ),
        (
            "Of a clipped sum that is formed in tiles only the last one counts.",
            "total = part if total is None else total.add_(part)",
            "total = part",
            "unit/clipping_layers::any_ceiling_gives_the_same_result",
        ),
    ],
    "clipping/kernels/norms.py": [
        (
            "Products of tokens in different tiles count once instead of twice.",
            "times = 1 if i == j else 2",
            "times = 1",
            ("unit/clipping_norms_bound::opposing_tokens", "unit/clipping_norms_bound::layers"),
        ),
        (
            "All samples have one norm for a parameter that is a number.",
            "stack.unsqueeze(1) if stack.dim() == 1",
            "stack.unsqueeze(0) if stack.dim() == 1",
            "unit/clipping_norms_bound::a_number_for_each_sample_is_its_gradient",
        ),
    ],
    "clipping/forwards/state.py": [
        (
            "Tokens are counted to other samples where the tokens come first.",
            "return x.movedim(1, 0).unsqueeze(2)",
            "return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).unsqueeze(2)",
            "unit/clipping_arrangement::rows_belong_to_their_samples",
        ),
        (
            "Rows that are folded into the batch with the tokens first are counted to other samples.",
            "return x.reshape(rows, batch, *x.shape[1:]).transpose(0, 1)",
            "return x.reshape(batch, rows, *x.shape[1:])",
            "unit/clipping_arrangement::rows_belong_to_their_samples",
        ),
    ],
    "clipping/forwards/repetition.py": [
        (
            "A forward under autocast is repeated without.",
            "torch.autocast(self.device, self.dtype, self.has_autocast, cache_enabled=False)",
            "torch.autocast(device, dtype, False, cache_enabled=False)",
            "kind_raw_matrix_autocast",
        ),
        (
            "A module with dropout is repeated with another mask.",
            "        with call.random.restored(), torch.enable_grad():",
            "        with torch.enable_grad():",
            "chance_dropout_0.5",
        ),
        (
            "A module that counts its calls is repeated as if it were called once more.",
            "        now = ModuleState(module)\n        self.state.restore()\n",
            "        now = ModuleState(module)\n",
            "modes_own_count_of_calls_repeated",
        ),
        (
            "A parameter of a module that has two names stays replaced by a tensor after its forward was repeated.",
            "args, kwargs, tie_weights=False)",
            "args, kwargs)",
            "kind_raw_of_two_names",
        ),
    ],
    "clipping/forwards/checkpoints.py": [
        (
            "A checkpoint in a repeated module runs again with parameters that require grad.",
            "            p.requires_grad = False",
            "            p.requires_grad = True",
            (
                "checkpoint_inside_reentrant_plain",
                "checkpoint_inside_not_reentrant_plain",
                "checkpoint_around_not_reentrant_repeated",
            ),
        ),
    ],
}
