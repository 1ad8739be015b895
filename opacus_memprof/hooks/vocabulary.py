# SPDX-License-Identifier: Apache-2.0
"""The ids of the categories and phases that hooks use; csrc/core/vocabulary.h explains them."""

from typing import Final

from opacus_memprof.recording import native

UNATTRIBUTED: Final = native.category_id("unattributed")
MODEL_PARAMETERS: Final = native.category_id("model_parameters")
BUFFERS: Final = native.category_id("buffers")
GRADIENTS: Final = native.category_id("gradients")
OPTIMIZER_STATES: Final = native.category_id("optimizer_states")
PER_SAMPLE_GRADIENTS: Final = native.category_id("per_sample_gradients")
NORM_SAMPLES: Final = native.category_id("norm_samples")
TEMP_MATRICES: Final = native.category_id("temp_matrices")
CLIPPING_TEMPORARIES: Final = native.category_id("clipping_temporaries")
SUMMED_GRADIENTS: Final = native.category_id("summed_gradients")
NOISE: Final = native.category_id("noise")
BACKPROP_COPIES: Final = native.category_id("backprop_copies")
COMMUNICATION: Final = native.category_id("communication")
INPUTS: Final = native.category_id("inputs")
FORWARD_UNDECIDED: Final = native.category_id("forward_undecided")
BACKWARD_TEMPORARIES: Final = native.category_id("backward_temporaries")
OPTIMIZER_TEMPORARIES: Final = native.category_id("optimizer_temporaries")
DATASET: Final = native.category_id("dataset")  # not one of the core's built-in categories

IDLE: Final = native.phase_id("idle")
SETUP: Final = native.phase_id("setup")
FORWARD: Final = native.phase_id("forward")
CLIP: Final = native.phase_id("clip")
ADD_NOISE: Final = native.phase_id("noise")
OPTIMIZER_STEP: Final = native.phase_id("optimizer_step")
ZERO_GRAD: Final = native.phase_id("zero_grad")
