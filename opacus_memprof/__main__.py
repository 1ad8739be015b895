# SPDX-License-Identifier: Apache-2.0
"""Runs `opacus-memprof` as `python -m opacus_memprof`."""

from opacus_memprof.cli import main

main()
