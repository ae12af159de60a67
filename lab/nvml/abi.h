/* The binary interface of libnvidia-ml.so.1, as far as the simulator answers it.
 *
 * Declared anew from what callers pass and read; tests/nvml/test_abi.py proves every size, offset
 * and version word here equal to NVIDIA's own nvml.h.  Names follow NVML's minus their "_t", so
 * that a reader finds them in NVIDIA's documentation. */
#ifndef GPUFLEET_NVML_ABI_H
#define GPUFLEET_NVML_ABI_H

enum nvmlReturn {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NO_PERMISSION = 4,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
    NVML_TIMEOUT = 10,
    NVML_FUNCTION_NOT_FOUND = 13,
    NVML_CORRUPTED_INFOROM = 14,
    NVML_GPU_IS_LOST = 15,
    NVML_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_UNKNOWN = 999,
};

/* A versioned structure begins with its own size and, in the top byte, its version. */
#define STRUCT_VERSION(type, version) (sizeof(struct type) | (version) << 24)

struct nvmlPciInfo {
    char busIdLegacy[16];
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pciDeviceId;
    unsigned pciSubSystemId;
    char busId[32];
};

struct nvmlPciInfoExt_v1 {
    unsigned version;
    unsigned domain;
    unsigned bus;
    unsigned device;
    unsigned pciDeviceId;
    unsigned pciSubSystemId;
    unsigned baseClass;
    unsigned subClass;
    char busId[32];
};

struct nvmlExcludedDeviceInfo {
    struct nvmlPciInfo pciInfo;
    char uuid[80];
};

struct nvmlMemory {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
};

struct nvmlMemory_v2 {
    unsigned version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
};

struct nvmlBAR1Memory {
    unsigned long long bar1Total;
    unsigned long long bar1Free;
    unsigned long long bar1Used;
};

struct nvmlUtilization {
    unsigned gpu;
    unsigned memory;
};

struct nvmlProcessInfo {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId;
    unsigned computeInstanceId;
};

struct nvmlRowRemapperHistogramValues {
    unsigned max;
    unsigned high;
    unsigned partial;
    unsigned low;
    unsigned none;
};

struct nvmlEccSramErrorStatus_v1 {
    unsigned version;
    unsigned long long aggregateUncParity;
    unsigned long long aggregateUncSecDed;
    unsigned long long aggregateCor;
    unsigned long long volatileUncParity;
    unsigned long long volatileUncSecDed;
    unsigned long long volatileCor;
    unsigned long long aggregateUncBucketL2;
    unsigned long long aggregateUncBucketSm;
    unsigned long long aggregateUncBucketPcie;
    unsigned long long aggregateUncBucketMcu;
    unsigned long long aggregateUncBucketOther;
    unsigned bThresholdExceeded;
};

struct nvmlRepairStatus_v1 {
    unsigned version;
    unsigned bChannelRepairPending;
    unsigned bTpcRepairPending;
};

struct nvmlTemperature_v1 {
    unsigned version;
    unsigned sensorType;
    int temperature;
};

struct nvmlMarginTemperature_v1 {
    unsigned version;
    int marginTemperature;
};

/* R525's unversioned form; the versioned forms share the middle but not the beginning. */
struct nvmlGpuFabricInfo {
    unsigned char clusterUuid[16];
    unsigned status;
    unsigned cliqueId;
    unsigned char state;
};

struct nvmlGpuFabricInfo_v2 {
    unsigned version;
    unsigned char clusterUuid[16];
    unsigned status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
};

struct nvmlGpuFabricInfo_v3 {
    unsigned version;
    unsigned char clusterUuid[16];
    unsigned status;
    unsigned cliqueId;
    unsigned char state;
    unsigned healthMask;
    unsigned char healthSummary;
};

struct nvmlPlatformInfo_v2 {
    unsigned version;
    unsigned char ibGuid[16];
    unsigned char chassisSerialNumber[16];
    unsigned char slotNumber;
    unsigned char trayIndex;
    unsigned char hostId;
    unsigned char peerType;
    unsigned char moduleId;
};

struct nvmlC2cModeInfo_v1 {
    unsigned isC2cEnabled;
};

struct nvmlDeviceAddressingMode_v1 {
    unsigned version;
    unsigned value;
};

struct nvmlConfComputeSystemState {
    unsigned environment;
    unsigned ccFeature;
    unsigned devToolsMode;
};

struct nvmlSystemDriverBranchInfo_v1 {
    unsigned version;
    char branch[80];
};

struct nvmlEventData {
    const void *device;
    unsigned long long eventType;
    unsigned long long eventData;
    unsigned gpuInstanceId;
    unsigned computeInstanceId;
};

enum nvmlValueType {
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
    NVML_VALUE_TYPE_SIGNED_INT = 5,
};

struct nvmlFieldValue {
    unsigned fieldId;
    unsigned scopeId;
    long long timestamp;
    long long latencyUsec;
    unsigned valueType;
    unsigned nvmlReturn;
    union {
        unsigned uiVal;
        int siVal;
        unsigned long long ullVal;
    } value;
};

#endif
