/* What a GPU is: its names, its place on PCIe, its memory. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <string.h>

#include "sim.h"

/* ---- names ---- */

TEXT_GETTER(nvmlDeviceGetName, "name")
TEXT_GETTER(nvmlDeviceGetUUID, "uuid")
TEXT_GETTER(nvmlDeviceGetSerial, "serial")
TEXT_GETTER(nvmlDeviceGetVbiosVersion, "vbios")
TEXT_GETTER(nvmlDeviceGetBoardPartNumber, "part")
TEXT_GETTER(nvmlDeviceGetInforomImageVersion, "inforom")

/* The firmware comes with the driver. */
NVML_API nvmlDeviceGetGspFirmwareVersion(const struct gpu *gpu, char *out, unsigned size)
{
    ENTER_GPU(gpu);
    const char *said = gpu_text(gpu, "gsp");
    return answer_text(out, size, said && profile_text("system.loaded") ? driver_version() : said);
}
NUMBER_GETTER(nvmlDeviceGetBrand, "brand")
NUMBER_GETTER(nvmlDeviceGetArchitecture, "arch")
NUMBER_GETTER(nvmlDeviceGetModuleId, "module")
NUMBER_GETTER(nvmlDeviceGetNumGpuCores, "cores")
NUMBER_GETTER(nvmlDeviceGetMemoryBusWidth, "mem.bus_width")

NVML_API nvmlDeviceGetIndex(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, gpu->index);
}

/* N of /dev/nvidiaN. */
NVML_API nvmlDeviceGetMinorNumber(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, (unsigned)gpu_number(gpu, "minor", gpu->index));
}

NVML_API nvmlDeviceGetMultiGpuBoard(const struct gpu *gpu, unsigned *out)
{
    ENTER_GPU(gpu);
    return answer_unsigned(out, 0);
}

NVML_API nvmlDeviceGetCudaComputeCapability(const struct gpu *gpu, int *major, int *minor)
{
    ENTER_GPU(gpu);
    const char *capability = gpu_text(gpu, "cc");
    if (!major || !minor)
        return NVML_INVALID_ARGUMENT;
    return capability && sscanf(capability, "%d.%d", major, minor) == 2 ? NVML_SUCCESS
                                                                        : NVML_NOT_SUPPORTED;
}

NVML_API nvmlDeviceValidateInforom(const struct gpu *gpu)
{
    ENTER_GPU(gpu);
    if (!gpu_has(gpu, "inforom"))
        return NVML_NOT_SUPPORTED;
    return gpu_number(gpu, "inforom.corrupted", 0) ? NVML_CORRUPTED_INFOROM : NVML_SUCCESS;
}

/* Where the board sits in a rack: Blackwell trays say so. */
NVML_API nvmlDeviceGetPlatformInfo(const struct gpu *gpu, struct nvmlPlatformInfo_v2 *out)
{
    ENTER_GPU(gpu);
    const char *chassis = gpu_text(gpu, "platform.chassis");
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlPlatformInfo_v2, 2))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!chassis)
        return NVML_NOT_SUPPORTED;
    memset(out->ibGuid, 0, sizeof out->ibGuid);
    strncpy((char *)out->chassisSerialNumber, chassis, sizeof out->chassisSerialNumber);
    out->slotNumber = (unsigned char)gpu_number(gpu, "platform.slot", 0);
    out->trayIndex = (unsigned char)gpu_number(gpu, "platform.tray", 0);
    out->hostId = (unsigned char)gpu_number(gpu, "platform.host", 0);
    out->peerType = (unsigned char)gpu_number(gpu, "platform.peer_type", 0);
    out->moduleId = (unsigned char)gpu_number(gpu, "module", 0);
    return NVML_SUCCESS;
}

/* ---- place on PCIe ---- */

/* bus_id is what sysfs calls the device, "0000:18:00.0"; NVML writes it with eight digits of
 * domain, upper case, and always function 0. */
int pci_info(const char *bus_id, unsigned device_id, unsigned subsystem, struct nvmlPciInfo *out)
{
    unsigned domain, bus, device, function;
    if (!bus_id || sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
        return NVML_NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", domain & 0xffff,
             bus & 0xff, device & 0xff);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", domain, bus & 0xff, device & 0xff);
    out->domain = domain;
    out->bus = bus;
    out->device = device;
    out->pciDeviceId = device_id;
    out->pciSubSystemId = subsystem;
    return NVML_SUCCESS;
}

static int own_pci_info(const struct gpu *gpu, struct nvmlPciInfo *out)
{
    return pci_info(gpu_text(gpu, "busid"), (unsigned)gpu_number(gpu, "pci.id", 0),
                    (unsigned)gpu_number(gpu, "pci.subsys", 0), out);
}

NVML_API nvmlDeviceGetPciInfo_v3(const struct gpu *gpu, struct nvmlPciInfo *out)
{
    ENTER_GPU(gpu);
    return out ? own_pci_info(gpu, out) : NVML_INVALID_ARGUMENT;
}

NVML_API nvmlDeviceGetPciInfoExt(const struct gpu *gpu, struct nvmlPciInfoExt_v1 *out)
{
    struct nvmlPciInfo pci;
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlPciInfoExt_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    int found = own_pci_info(gpu, &pci);
    if (found != NVML_SUCCESS)
        return found;
    *out = (struct nvmlPciInfoExt_v1){
        .version = out->version,
        .domain = pci.domain,
        .bus = pci.bus,
        .device = pci.device,
        .pciDeviceId = pci.pciDeviceId,
        .pciSubSystemId = pci.pciSubSystemId,
        .baseClass = 0x03, /* display controller ... */
        .subClass = 0x02,  /* ... that is a 3D controller: PCI code and ID assignment */
    };
    memcpy(out->busId, pci.busId, sizeof out->busId);
    return NVML_SUCCESS;
}

NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.gen")
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.gen_max")
NUMBER_GETTER(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie.gen_max")
NUMBER_GETTER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER_GETTER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width_max")
NUMBER_GETTER(nvmlDeviceGetPcieReplayCounter, "pcie.replay")

NVML_API nvmlDeviceGetPcieThroughput(const struct gpu *gpu, unsigned counter, unsigned *out)
{
    ENTER_GPU(gpu);
    return counter <= 1 ? answer_unsigned(out, 0) : NVML_INVALID_ARGUMENT;
}

/* ---- memory ---- */

static unsigned long long bytes(const struct gpu *gpu, const char *key)
{
    return (unsigned long long)gpu_number(gpu, key, 0) << 20;
}

static unsigned long long allocated(const struct gpu *gpu)
{
    return bytes(gpu, "mem.used_mib") + processes_memory(gpu);
}

/* A profile may give away more than there is; NVML never counts below zero. */
static unsigned long long left(unsigned long long total, unsigned long long taken)
{
    return taken < total ? total - taken : 0;
}

/* The first form counts what the driver keeps for itself as used. */
NVML_API nvmlDeviceGetMemoryInfo(const struct gpu *gpu, struct nvmlMemory *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "mem.total_mib"))
        return NVML_NOT_SUPPORTED;
    out->total = bytes(gpu, "mem.total_mib");
    out->used = bytes(gpu, "mem.reserved_mib") + allocated(gpu);
    out->free = left(out->total, out->used);
    return NVML_SUCCESS;
}

/* The second tells the two apart. */
NVML_API nvmlDeviceGetMemoryInfo_v2(const struct gpu *gpu, struct nvmlMemory_v2 *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlMemory_v2, 2))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!gpu_has(gpu, "mem.total_mib"))
        return NVML_NOT_SUPPORTED;
    out->total = bytes(gpu, "mem.total_mib");
    out->reserved = bytes(gpu, "mem.reserved_mib");
    out->used = allocated(gpu);
    out->free = left(out->total, out->reserved + out->used);
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetBAR1MemoryInfo(const struct gpu *gpu, struct nvmlBAR1Memory *out)
{
    ENTER_GPU(gpu);
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!gpu_has(gpu, "bar1_mib"))
        return NVML_NOT_SUPPORTED;
    out->bar1Total = bytes(gpu, "bar1_mib");
    out->bar1Used = 1ull << 20;
    out->bar1Free = out->bar1Total - out->bar1Used;
    return NVML_SUCCESS;
}
