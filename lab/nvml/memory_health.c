/* What memory has suffered: ECC counters, remapped rows, retired pages, repairs that wait. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>

#include "sim.h"

/* ---- ECC ---- */

NVML_API nvmlDeviceGetEccMode(const struct gpu *gpu, unsigned *now, unsigned *after_reset)
{
    ENTER_GPU(gpu);
    int answered = answer_number(gpu, "ecc.mode", now);
    if (answered != NVML_SUCCESS)
        return answered;
    return answer_unsigned(after_reset, (unsigned)gpu_number(gpu, "ecc.pending", *now));
}

/* Takes effect with the next reset, so it only becomes pending. */
NVML_API nvmlDeviceSetEccMode(const struct gpu *gpu, unsigned enabled)
{
    ENTER_GPU(gpu);
    if (!gpu_has(gpu, "ecc.mode"))
        return NVML_NOT_SUPPORTED;
    return enabled <= 1 ? state_write(gpu, "ecc.pending", enabled) : NVML_INVALID_ARGUMENT;
}

/* One counter: ecc.{cor,unc}_{vol,agg}, plus ".dram" or ".sram" for a place. */
static unsigned long long ecc_count(const struct gpu *gpu, unsigned uncorrected, unsigned aggregate,
                                    const char *place)
{
    char key[64];
    snprintf(key, sizeof key, "ecc.%s_%s%s", uncorrected ? "unc" : "cor",
             aggregate ? "agg" : "vol", place);
    return (unsigned long long)gpu_number(gpu, key, 0);
}

static bool ecc_counts(const struct gpu *gpu)
{
    return gpu_number(gpu, "ecc.mode", 0) != 0;
}

NVML_API nvmlDeviceGetTotalEccErrors(const struct gpu *gpu, unsigned uncorrected,
                                     unsigned aggregate, unsigned long long *out)
{
    ENTER_GPU(gpu);
    if (!out || uncorrected > 1 || aggregate > 1)
        return NVML_INVALID_ARGUMENT;
    if (!ecc_counts(gpu))
        return NVML_NOT_SUPPORTED;
    *out = ecc_count(gpu, uncorrected, aggregate, "") +
           ecc_count(gpu, uncorrected, aggregate, ".dram") +
           ecc_count(gpu, uncorrected, aggregate, ".sram");
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetMemoryErrorCounter(const struct gpu *gpu, unsigned uncorrected,
                                         unsigned aggregate, unsigned location,
                                         unsigned long long *out)
{
    enum { DRAM = 2, SRAM = 7 }; /* nvmlMemoryLocation: all that Turing and later count */
    ENTER_GPU(gpu);
    if (!out || uncorrected > 1 || aggregate > 1)
        return NVML_INVALID_ARGUMENT;
    if (!ecc_counts(gpu) || (location != DRAM && location != SRAM))
        return NVML_NOT_SUPPORTED;
    *out = ecc_count(gpu, uncorrected, aggregate, location == DRAM ? ".dram" : ".sram");
    return NVML_SUCCESS;
}

/* Ampere and later, told by row remapping, which came with it. */
NVML_API nvmlDeviceGetSramEccErrorStatus(const struct gpu *gpu,
                                         struct nvmlEccSramErrorStatus_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlEccSramErrorStatus_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!ecc_counts(gpu) || !gpu_has(gpu, "remap.unc"))
        return NVML_NOT_SUPPORTED;
    *out = (struct nvmlEccSramErrorStatus_v1){
        .version = out->version,
        .aggregateUncSecDed = ecc_count(gpu, 1, 1, ".sram"),
        .aggregateCor = ecc_count(gpu, 0, 1, ".sram"),
        .volatileUncSecDed = ecc_count(gpu, 1, 0, ".sram"),
        .volatileCor = ecc_count(gpu, 0, 0, ".sram"),
        .aggregateUncBucketSm = ecc_count(gpu, 1, 1, ".sram"),
        .bThresholdExceeded = gpu_number(gpu, "ecc.sram_threshold", 0) != 0,
    };
    return NVML_SUCCESS;
}

/* ---- remapped rows: Ampere and later ---- */

NVML_API nvmlDeviceGetRemappedRows(const struct gpu *gpu, unsigned *corrected,
                                   unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    ENTER_GPU(gpu);
    if (!corrected || !uncorrected || !pending || !failed)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "remap.unc"))
        return NVML_NOT_SUPPORTED;
    *corrected = (unsigned)gpu_number(gpu, "remap.cor", 0);
    *uncorrected = (unsigned)gpu_number(gpu, "remap.unc", 0);
    *pending = (unsigned)gpu_number(gpu, "remap.pending", 0);
    *failed = (unsigned)gpu_number(gpu, "remap.failure", 0);
    return NVML_SUCCESS;
}

/* How many banks have how many spare rows left. */
NVML_API nvmlDeviceGetRowRemapperHistogram(const struct gpu *gpu,
                                           struct nvmlRowRemapperHistogramValues *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "remap.unc") || !gpu_has(gpu, "remap.max"))
        return NVML_NOT_SUPPORTED;
    *out = (struct nvmlRowRemapperHistogramValues){
        .max = (unsigned)gpu_number(gpu, "remap.max", 0),
        .high = (unsigned)gpu_number(gpu, "remap.high", 0),
        .partial = (unsigned)gpu_number(gpu, "remap.partial", 0),
        .low = (unsigned)gpu_number(gpu, "remap.low", 0),
        .none = (unsigned)gpu_number(gpu, "remap.none", 0),
    };
    return NVML_SUCCESS;
}

/* ---- retired pages: Volta and Turing ---- */

/* Called twice: once for the number, once with room for the addresses. */
NVML_API nvmlDeviceGetRetiredPages(const struct gpu *gpu, unsigned cause, unsigned *count,
                                   unsigned long long *addresses)
{
    ENTER_GPU(gpu);
    const char *key = cause == 0 ? "retired.sbe" : "retired.dbe";
    if (!count || cause > 1)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, key))
        return NVML_NOT_SUPPORTED;
    unsigned room = *count;
    *count = (unsigned)gpu_number(gpu, key, 0);
    if (*count > room)
        return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; addresses && i < *count; i++)
        addresses[i] = 0x10000ull * (i + 1); /* some page: nobody compares addresses */
    return NVML_SUCCESS;
}

NUMBER_GETTER(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending")

/* ---- repairs that wait for a reset: Blackwell ---- */

NVML_API nvmlDeviceGetRepairStatus(const struct gpu *gpu, struct nvmlRepairStatus_v1 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlRepairStatus_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!gpu_has(gpu, "repair.channel"))
        return NVML_NOT_SUPPORTED;
    out->bChannelRepairPending = (unsigned)gpu_number(gpu, "repair.channel", 0);
    out->bTpcRepairPending = (unsigned)gpu_number(gpu, "repair.tpc", 0);
    return NVML_SUCCESS;
}

NUMBER_GETTER(nvmlDeviceGetUnrepairableMemoryFlag_v1, "repair.unrepairable")
