// SPDX-License-Identifier: Apache-2.0
// The words of the report, for those who see one for the first time.

const MEANINGS = new Map([
  ["model_parameters", "the model's parameters"],
  ["buffers", "the model's buffers"],
  ["gradients", "p.grad"],
  ["optimizer_states", "what the optimizer keeps from step to step, such as Adam's moments"],
  ["activations", "made in forward and kept for backward"],
  ["activation_hooks", "layer inputs that Opacus' hooks have captured"],
  ["per_sample_gradients", "a gradient for every sample of the batch, grad_sample"],
  ["norm_samples", "per-sample norms of ghost clipping"],
  ["temp_matrices", "temporaries of norms and per-sample gradients, such as T×T matrices"],
  ["clipping_temporaries", "norms, clip factors and products in clipping"],
  ["summed_gradients", "the sum of clipped gradients, summed_grad"],
  ["noise", "the noise that is added for privacy"],
  ["backprop_copies", "copies of output gradients that Opacus' hooks make"],
  ["forward_temporaries", "made and freed within forward"],
  ["backward_temporaries", "made and freed within backward"],
  ["optimizer_temporaries", "made and freed within the optimizer's step"],
  ["forward_undecided", "made in forward; whether kept for backward is not known"],
  ["communication", "buckets and reductions of distributed training"],
  ["unsharded_parameters", "parameters that FSDP2 has gathered, for as long as a layer computes"],
  ["unsharded_gradients", "their gradients, until FSDP2 has scattered them"],
  ["library_workspace", "workspaces of cuBLAS and cuDNN"],
  ["inputs", "the batch"],
  ["dataset", "tensors of the data set that a DataLoader draws from"],
  ["pending_free", "freed by the program, while a side stream still uses it"],
  ["unattributed", "the rest"],
]);

function meanings(categories) {
  const known = categories.filter((name) => MEANINGS.has(name));
  const items = known.map((name) => element("div", {}, element("dt", {}, name), element("dd", {}, MEANINGS.get(name))));
  const list = element("dl", { class: "meanings" }, items);
  return element("details", {}, element("summary", {}, "What the categories are"), list);
}
