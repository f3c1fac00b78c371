from local_runtime.errors import ErrorCode, InferenceError, in_ensemble


def test_error_in_an_ensemble_keeps_its_code():
    error = in_ensemble("ens", InferenceError(ErrorCode.INVALID_ARG, "pre: negative"))
    assert (error.code, error.message) == (ErrorCode.INVALID_ARG, "in ensemble 'ens', pre: negative")
