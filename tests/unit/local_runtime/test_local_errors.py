import pytest

from local_runtime.errors import Blame, ErrorCode, InferenceError, in_ensemble


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_its_blame(code):
    assert code.blame in Blame


def test_error_in_an_ensemble_keeps_its_code():
    error = in_ensemble("ens", InferenceError(ErrorCode.INVALID_ARG, "pre: negative"))
    assert (error.code, error.message) == (ErrorCode.INVALID_ARG, "in ensemble 'ens', pre: negative")
