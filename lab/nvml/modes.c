/* What an operator may switch: persistence, compute mode, MIG; and how memory is addressed. */
#define _POSIX_C_SOURCE 200809L

#include <string.h>

#include "sim.h"

NUMBER_GETTER(nvmlDeviceGetPersistenceMode, "persistence")
NUMBER_GETTER(nvmlDeviceGetComputeMode, "computemode")

NVML_API nvmlDeviceSetPersistenceMode(const struct gpu *gpu, unsigned enabled)
{
    ENTER_GPU(gpu);
    return enabled <= 1 ? state_write(gpu, "persistence", enabled) : NVML_INVALID_ARGUMENT;
}

/* 0 default, 2 prohibited, 3 exclusive process; 1, exclusive thread, is gone since CUDA 8. */
NVML_API nvmlDeviceSetComputeMode(const struct gpu *gpu, unsigned mode)
{
    ENTER_GPU(gpu);
    bool known = mode == 0 || mode == 2 || mode == 3;
    return known ? state_write(gpu, "computemode", mode) : NVML_INVALID_ARGUMENT;
}

/* ---- MIG: the mode only; instances are not simulated ---- */

NVML_API nvmlDeviceGetMigMode(const struct gpu *gpu, unsigned *now, unsigned *after_reset)
{
    ENTER_GPU(gpu);
    int answered = answer_number(gpu, "mig", now);
    if (answered != NVML_SUCCESS)
        return answered;
    return answer_unsigned(after_reset, (unsigned)gpu_number(gpu, "mig.pending", *now));
}

/* Hopper and later switch at once; Ampere waits for a reset (NVIDIA MIG user guide, "Enable MIG
 * Mode"). Architecture numbers are NVML's: 9 is Hopper. */
NVML_API nvmlDeviceSetMigMode(const struct gpu *gpu, unsigned enabled, unsigned *activation)
{
    ENTER_GPU(gpu);
    if (!gpu_has(gpu, "mig"))
        return NVML_NOT_SUPPORTED;
    if (enabled > 1 || !activation)
        return NVML_INVALID_ARGUMENT;
    *activation = NVML_SUCCESS;
    int written = state_write(gpu, "mig.pending", enabled);
    if (written == NVML_SUCCESS && gpu_number(gpu, "arch", 0) >= 9)
        written = state_write(gpu, "mig", enabled);
    return written;
}

NVML_API nvmlDeviceGetMaxMigDeviceCount(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, gpu_number(gpu, "mig", 0) ? 7 : 0);
}

NVML_API nvmlDeviceIsMigDeviceHandle(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, 0);
}

NVML_API nvmlDeviceGetMigDeviceHandleByIndex(const struct gpu *gpu, unsigned index, void **out)
{
    ENTER_GPU(gpu);
    (void)index;
    (void)out;
    return NVML_NOT_FOUND;
}

/* ---- memory shared with the CPU: Grace ---- */

/* 0 none, 1 HMM, 2 ATS. */
NVML_API nvmlDeviceGetAddressingMode(const struct gpu *gpu, struct nvmlDeviceAddressingMode_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlDeviceAddressingMode_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    return answer_number(gpu, "addressing", &out->value);
}

NVML_API nvmlDeviceGetC2cModeInfoV(const struct gpu *gpu, struct nvmlC2cModeInfo_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "c2c.links"))
        return NVML_NOT_SUPPORTED;
    out->isC2cEnabled = gpu_number(gpu, "c2c.links", 0) > 0;
    return NVML_SUCCESS;
}

/* ---- screens: there are none ---- */

NVML_API nvmlDeviceGetDisplayActive(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, 0);
}

NVML_API nvmlDeviceGetDisplayMode(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, 0);
}
