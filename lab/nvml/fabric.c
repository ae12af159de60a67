/* The NVLink fabric as its manager left it: state, cluster, clique, health.
 *
 * fabric.state is 0 not supported, 1 not started, 2 in progress, 3 completed; a GPU older than
 * Hopper has no such key and answers NOT_SUPPORTED. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <string.h>

#include "sim.h"

/* "8f1d2c3b-4a5e-..." to sixteen bytes; absent is zeros, as one node without a cluster has. */
static void cluster_uuid(const struct gpu *gpu, unsigned char out[16])
{
    const char *text = gpu_text(gpu, "fabric.uuid");
    memset(out, 0, 16);
    for (unsigned i = 0; text && *text && i < 16; i++, text += 2) {
        unsigned byte;
        while (*text == '-')
            text++;
        if (sscanf(text, "%2x", &byte) != 1)
            return;
        out[i] = (unsigned char)byte;
    }
}

/* The widest form; the others are parts of it. */
static struct nvmlGpuFabricInfo_v3 fabric(const struct gpu *gpu)
{
    struct nvmlGpuFabricInfo_v3 info = {0};
    cluster_uuid(gpu, info.clusterUuid);
    info.status = (unsigned)gpu_number(gpu, "fabric.status", NVML_SUCCESS);
    info.cliqueId = (unsigned)gpu_number(gpu, "fabric.clique", 0);
    info.state = (unsigned char)gpu_number(gpu, "fabric.state", 0);
    info.healthMask = (unsigned)gpu_number(gpu, "fabric.health", 0);
    info.healthSummary = (unsigned char)gpu_number(gpu, "fabric.summary", 0);
    return info;
}

/* Until the fabric manager has finished, GPUs on switches cannot reach each other. Assumed for
 * P2PStatus: not seen on hardware with the manager down. */
bool fabric_is_ready(const struct gpu *gpu)
{
    long long state = gpu_number(gpu, "fabric.state", 3);
    return state != 1 && state != 2;
}

NVML_API nvmlDeviceGetGpuFabricInfo(const struct gpu *gpu, struct nvmlGpuFabricInfo *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "fabric.state"))
        return NVML_NOT_SUPPORTED;
    struct nvmlGpuFabricInfo_v3 info = fabric(gpu);
    memcpy(out->clusterUuid, info.clusterUuid, sizeof out->clusterUuid);
    out->status = info.status;
    out->cliqueId = info.cliqueId;
    out->state = info.state;
    return NVML_SUCCESS;
}

/* R550 knows version 2; version 3 is assumed to have come with R580. */
NVML_API nvmlDeviceGetGpuFabricInfoV(const struct gpu *gpu, void *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    unsigned version;
    memcpy(&version, out, sizeof version);
    bool second = version == STRUCT_VERSION(nvmlGpuFabricInfo_v2, 2);
    bool third = version == STRUCT_VERSION(nvmlGpuFabricInfo_v3, 3) && driver_at_least(580, 0);
    if (!second && !third)
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!gpu_has(gpu, "fabric.state"))
        return NVML_NOT_SUPPORTED;
    struct nvmlGpuFabricInfo_v3 info = fabric(gpu);
    info.version = version;
    /* Version 2 is version 3 without its end. */
    memcpy(out, &info, second ? sizeof(struct nvmlGpuFabricInfo_v2) : sizeof info);
    return NVML_SUCCESS;
}
