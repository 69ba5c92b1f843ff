"""Triton's interpreter, which runs kernels on a CPU. Import before triton, in a process of its own.

It is chosen by an environment variable that triton reads when it is first imported. float32 and
float16 only: the interpreter has no working bfloat16.
"""

from __future__ import annotations

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

gc.disable()  # it would walk over millions of small objects, of which few are in cycles

_Builder = interpreter.InterpreterBuilder
_splat = _Builder.create_splat
_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang


def _patch_loop_bounds(tensor, scope):
    """The interpreter of triton 3.6 calls int() on one-element arrays, which numpy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _splat_conditions(self, ret_ty, arg):
    """The interpreter of triton 3.9 makes integers of a scalar condition that is broadcast, which
    loads refuse as a mask."""
    found = _splat(self, ret_ty, arg)
    found.data = found.data.astype(bool) if arg.data.dtype == bool else found.data
    return found


def _patch_once(function):
    """The interpreter replaces the language anew for each function that a kernel calls, which takes
    a third of its time and changes nothing where the kernel's launch has done it."""
    languages = [lang for lang in function.__globals__.values() if lang is tl or lang is tl.core]
    if any(tl.core.is_builtin(lang.load) for lang in languages):
        return _patch_language(function)
    return interpreter._LangPatchScope()


_Builder.create_splat = _splat_conditions
interpreter._patch_lang_tensor = _patch_loop_bounds
interpreter._patch_lang = _patch_once
