# SPDX-License-Identifier: Apache-2.0
"""What a profile is: the categories that its bytes are counted by. Needs no torch.

Not called `profile`, which is the public function that records one.
"""
