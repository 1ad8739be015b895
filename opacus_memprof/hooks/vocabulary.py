# SPDX-License-Identifier: Apache-2.0
"""The ids of the categories and phases that hooks use; csrc/core/vocabulary.h says what each means."""

from typing import Final

from opacus_memprof import _native

UNATTRIBUTED: Final = _native.category_id("unattributed")
MODEL_PARAMETERS: Final = _native.category_id("model_parameters")
BUFFERS: Final = _native.category_id("buffers")
GRADIENTS: Final = _native.category_id("gradients")
OPTIMIZER_STATES: Final = _native.category_id("optimizer_states")
PER_SAMPLE_GRADIENTS: Final = _native.category_id("per_sample_gradients")
NORM_SAMPLES: Final = _native.category_id("norm_samples")
TEMP_MATRICES: Final = _native.category_id("temp_matrices")
CLIPPING_TEMPORARIES: Final = _native.category_id("clipping_temporaries")
SUMMED_GRADIENTS: Final = _native.category_id("summed_gradients")
NOISE: Final = _native.category_id("noise")
BACKPROP_COPIES: Final = _native.category_id("backprop_copies")
COMMUNICATION: Final = _native.category_id("communication")
INPUTS: Final = _native.category_id("inputs")
FORWARD_UNDECIDED: Final = _native.category_id("forward_undecided")
DATASET: Final = _native.category_id("dataset")  # not of the core's, but as the program's own are

IDLE: Final = _native.phase_id("idle")
SETUP: Final = _native.phase_id("setup")
FORWARD: Final = _native.phase_id("forward")
CLIP: Final = _native.phase_id("clip")
ADD_NOISE: Final = _native.phase_id("noise")
OPTIMIZER_STEP: Final = _native.phase_id("optimizer_step")
ZERO_GRAD: Final = _native.phase_id("zero_grad")
