"""Devices in the table and out of it, the model of a sweep's cost, and the chunk lengths that follow."""

from dataclasses import replace

import pytest
import torch
from graphs import layer_region

from streambp_compile.config import Config
from streambp_compile.device import planned_for
from streambp_compile.passes.cost import Cost, Work, reached
from streambp_compile.passes.device import KNOWN, REFERENCE_CPU, derived, known, named
from streambp_compile.passes.ir import EVERYWHERE, FUTURE, PAST, Reach

GIB = 2**30
