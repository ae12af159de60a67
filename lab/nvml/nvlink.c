/* NVLink: each link's state, version, far end and errors.
 *
 * nvlink.links  how many links the board has
 * nvlink.to     "switch", or pairs "FIRST-LAST:PEER,..." of link range and peer GPU
 * nvlink.down   links that are dead: "all" or a list such as "3,7-9"
 * nvlink.sleep  links in low power (state 2) */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum far_end { NOWHERE = -2, SWITCH = -1 }; /* else the peer's index */

unsigned nvlink_count(const struct gpu *gpu)
{
    return (unsigned)gpu_number(gpu, "nvlink.links", 0);
}

static int far_end(const struct gpu *gpu, unsigned link)
{
    const char *wiring = gpu_text(gpu, "nvlink.to");
    if (!wiring)
        return NOWHERE;
    if (strcmp(wiring, "switch") == 0)
        return SWITCH;
    while (wiring) {
        unsigned first, last;
        int peer;
        if (sscanf(wiring, "%u-%u:%d", &first, &last, &peer) == 3 && first <= link && link <= last)
            return peer;
        wiring = strchr(wiring, ',');
        if (wiring)
            wiring++;
    }
    return NOWHERE;
}

/* A cable is dead when either end is; a lost GPU takes its direct peers' links with it. */
bool nvlink_is_up(const struct gpu *gpu, unsigned link)
{
    int peer = far_end(gpu, link);
    if (peer == NOWHERE || list_contains(gpu_text(gpu, "nvlink.down"), link) || gpu_is_lost(gpu))
        return false;
    if (peer == SWITCH)
        return true;
    return (unsigned)peer < gpu_count() && !gpu_is_lost(gpu_at((unsigned)peer));
}

/* 0 inactive, 1 active, 2 asleep. */
unsigned nvlink_state(const struct gpu *gpu, unsigned link)
{
    if (!nvlink_is_up(gpu, link))
        return 0;
    return list_contains(gpu_text(gpu, "nvlink.sleep"), link) ? 2 : 1;
}

static unsigned live_links_to(const struct gpu *gpu, int peer)
{
    unsigned live = 0;
    for (unsigned link = 0; link < nvlink_count(gpu); link++)
        live += nvlink_is_up(gpu, link) && far_end(gpu, link) == peer;
    return live;
}

unsigned nvlink_switch_links(const struct gpu *gpu)
{
    return live_links_to(gpu, SWITCH);
}

/* Links between two GPUs, direct or through the switches: what `nvidia-smi topo -m` calls NV#. */
unsigned nvlink_width(const struct gpu *a, const struct gpu *b)
{
    unsigned a_switched = nvlink_switch_links(a), b_switched = nvlink_switch_links(b);
    return live_links_to(a, (int)b->index) + (a_switched < b_switched ? a_switched : b_switched);
}

/* nvlink.err.KIND.LINK */
unsigned long long nvlink_errors(const struct gpu *gpu, const char *kind, unsigned link)
{
    char key[64];
    snprintf(key, sizeof key, "nvlink.err.%s.%u", kind, link);
    return (unsigned long long)gpu_number(gpu, key, 0);
}

/* ---- the calls ---- */

/* A board without NVLink says so; a link past the last one is a bad argument. */
static int link_exists(const struct gpu *gpu, unsigned link)
{
    if (!nvlink_count(gpu))
        return NVML_NOT_SUPPORTED;
    return link < nvlink_count(gpu) ? NVML_SUCCESS : NVML_INVALID_ARGUMENT;
}

NVML_API nvmlDeviceGetNvLinkState(const struct gpu *gpu, unsigned link, unsigned *out)
{
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    return exists == NVML_SUCCESS ? answer_unsigned(out, nvlink_state(gpu, link)) : exists;
}

/* An enum, not the marketing number: 4 is NVLink 3.0, 6 is 4.0, 7 is 5.0. */
NVML_API nvmlDeviceGetNvLinkVersion(const struct gpu *gpu, unsigned link, unsigned *out)
{
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    return exists == NVML_SUCCESS ? answer_number(gpu, "nvlink.version", out) : exists;
}

/* 0 P2P, 1 system memory, 2 P2P atomics, 3 system atomics, 4 SLI bridge, 5 link valid. */
NVML_API nvmlDeviceGetNvLinkCapability(const struct gpu *gpu, unsigned link, unsigned capability,
                                       unsigned *out)
{
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    if (exists != NVML_SUCCESS)
        return exists;
    return nvlink_is_up(gpu, link) ? answer_unsigned(out, capability != 4) : NVML_NOT_SUPPORTED;
}

/* 0 GPU, 1 IBM NPU, 2 switch, 255 unknown: a virtual machine does not see its switches. */
NVML_API nvmlDeviceGetNvLinkRemoteDeviceType(const struct gpu *gpu, unsigned link, unsigned *out)
{
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    if (exists != NVML_SUCCESS)
        return exists;
    if (!nvlink_is_up(gpu, link))
        return NVML_NOT_SUPPORTED;
    long long type = far_end(gpu, link) == SWITCH ? 2 : 0;
    return answer_unsigned(out, (unsigned)gpu_number(gpu, "nvlink.remote_type", type));
}

/* The switches' places on PCIe, from bus c4 as in a DGX A100, links dealt to them in turn; no
 * place is all ones, as a GB200 answers for every link. */
static int switch_pci_info(const struct gpu *gpu, unsigned link, struct nvmlPciInfo *out)
{
    enum { FIRST_BUS = 0xc4, AMPERE = 7, OF_AMPERE = 0x1af110de, OF_HOPPER = 0x22a310de };
    unsigned id = gpu_number(gpu, "arch", 0) == AMPERE ? OF_AMPERE : OF_HOPPER;
    unsigned switches = (unsigned)gpu_number(gpu, "nvlink.switches", 0);
    char bus_id[32] = "ffffffff:ff:ff.0";
    if (switches)
        snprintf(bus_id, sizeof bus_id, "0000:%02x:00.0", FIRST_BUS + link % switches);
    return pci_info(bus_id, switches ? id : 0, 0, out);
}

NVML_API nvmlDeviceGetNvLinkRemotePciInfo_v2(const struct gpu *gpu, unsigned link,
                                             struct nvmlPciInfo *out)
{
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    if (exists != NVML_SUCCESS)
        return exists;
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!nvlink_is_up(gpu, link) || gpu_number(gpu, "nvlink.remote_type", 0) == 255)
        return NVML_NOT_SUPPORTED;
    int peer = far_end(gpu, link);
    if (peer == SWITCH)
        return switch_pci_info(gpu, link, out);
    const struct gpu *other = gpu_at((unsigned)peer);
    return pci_info(gpu_text(other, "busid"), (unsigned)gpu_number(other, "pci.id", 0), 0, out);
}

NVML_API nvmlDeviceGetNvLinkErrorCounter(const struct gpu *gpu, unsigned link, unsigned counter,
                                         unsigned long long *out)
{
    static const char *const kinds[] = {"replay", "recovery", "crc_flit", "crc_data", "ecc"};
    ENTER_GPU(gpu);
    int exists = link_exists(gpu, link);
    if (exists != NVML_SUCCESS)
        return exists;
    if (!out || counter >= sizeof kinds / sizeof *kinds)
        return NVML_INVALID_ARGUMENT;
    /* NVLink 5 (version 7) counts otherwise: field values 208 and up. */
    if (gpu_number(gpu, "nvlink.version", 0) >= 7)
        return NVML_NOT_SUPPORTED;
    *out = nvlink_errors(gpu, kinds[counter], link);
    return NVML_SUCCESS;
}
