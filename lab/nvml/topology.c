/* Who is near whom: PCIe ancestors, NUMA nodes, CPUs, peer-to-peer access.
 *
 * path is "NUMA.HOSTBRIDGE.TREE.SWITCH": two GPUs are as near as their paths agree from the left.
 * A GPU on a port of its own has a tree of its own; GPUs of one path hang on one switch. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { PATH_PARTS = 4 };

static void path(const struct gpu *gpu, int parts[PATH_PARTS])
{
    const char *text = gpu_text(gpu, "path");
    memset(parts, 0, PATH_PARTS * sizeof *parts);
    if (text)
        sscanf(text, "%d.%d.%d.%d", &parts[0], &parts[1], &parts[2], &parts[3]);
}

/* NVML's levels are named by what two GPUs share at best; `nvidia-smi topo -m` prints them so. */
NVML_API nvmlDeviceGetTopologyCommonAncestor(const struct gpu *gpu, const struct gpu *other,
                                             unsigned *out)
{
    static const unsigned levels[PATH_PARTS + 1] = {
        50, /* SYS: nothing but the machine */
        40, /* NODE: the NUMA node */
        30, /* PHB: the host bridge */
        20, /* PXB: a tree of switches */
        10, /* PIX: one switch */
    };
    int mine[PATH_PARTS], theirs[PATH_PARTS], shared = 0;
    ENTER_GPU(gpu);
    if (!gpu_of_handle(other))
        return NVML_INVALID_ARGUMENT;
    if (gpu_is_lost(other))
        return NVML_GPU_IS_LOST;
    if (gpu == other)
        return answer_unsigned(out, 0); /* on the same board */
    path(gpu, mine);
    path(other, theirs);
    while (shared < PATH_PARTS && mine[shared] == theirs[shared])
        shared++;
    return answer_unsigned(out, levels[shared]);
}

/* ---- CPUs and memory ---- */

/* How the binding learns which CPUs are near: NUMA scope and socket scope answer alike here. */
static int cpu_mask(const struct gpu *gpu, unsigned words, unsigned long *mask)
{
    if (!words || !mask)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "cpus"))
        return NVML_NOT_SUPPORTED;
    list_to_mask(gpu_text(gpu, "cpus"), words, mask);
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetCpuAffinity(const struct gpu *gpu, unsigned words, unsigned long *mask)
{
    ENTER_GPU(gpu);
    return cpu_mask(gpu, words, mask);
}

NVML_API nvmlDeviceGetCpuAffinityWithinScope(const struct gpu *gpu, unsigned words,
                                             unsigned long *mask, unsigned scope)
{
    ENTER_GPU(gpu);
    return scope <= 1 ? cpu_mask(gpu, words, mask) : NVML_INVALID_ARGUMENT;
}

/* The NUMA node of the CPUs beside the GPU: "numa", else the first part of "path". */
NVML_API nvmlDeviceGetMemoryAffinity(const struct gpu *gpu, unsigned words, unsigned long *mask,
                                     unsigned scope)
{
    int parts[PATH_PARTS];
    char node[16];
    ENTER_GPU(gpu);
    if (!words || !mask || scope > 1)
        return NVML_INVALID_ARGUMENT;
    path(gpu, parts);
    snprintf(node, sizeof node, "%lld", gpu_number(gpu, "numa", parts[0]));
    list_to_mask(node, words, mask);
    return NVML_SUCCESS;
}

/* Not the above: on Grace the GPU's own memory is a NUMA node, and this is its number. */
NUMBER_GETTER(nvmlDeviceGetNumaNodeId, "gpu_numa_id")

/* ---- peer to peer ---- */

/* What is asked: 0 read, 1 write, 2 NVLink, 3 atomics, 4 over PCIe.
 * Answers: 0 fine, 1 chipset, 2 GPU (the 4090's), 3 bridges, 4 registry key, 5 not supported. */
NVML_API nvmlDeviceGetP2PStatus(const struct gpu *gpu, const struct gpu *other, unsigned what,
                                unsigned *out)
{
    enum { NVLINK = 2, ATOMICS = 3, LAST = 5, NOT_SUPPORTED = 5 };
    ENTER_GPU(gpu);
    if (!gpu_of_handle(other) || what > LAST)
        return NVML_INVALID_ARGUMENT;
    if (gpu_is_lost(other))
        return NVML_GPU_IS_LOST;
    bool linked = nvlink_width(gpu, other) && fabric_is_ready(gpu) && fabric_is_ready(other);
    if (linked)
        return answer_unsigned(out, 0);
    if (what == NVLINK || what == ATOMICS)
        return answer_unsigned(out, NOT_SUPPORTED);
    return answer_unsigned(out, (unsigned)gpu_number(gpu, "p2p.pcie", 0));
}
