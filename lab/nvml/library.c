/* Opening the library, the driver's versions, and how a caller comes by a GPU. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "sim.h"

/* Generated from history.txt: in which driver a function first appeared. */
static const struct first_driver {
    const char *function;
    unsigned branch;
    unsigned release;
} history[] = {
#include "history.inc"
};

static atomic_uint users;
static struct gpu gpus[MAX_GPUS];

/* ---- the gate ---- */

/* How many calls this process has made: "count = 8,7@20" loses a GPU at the twentieth. */
static atomic_uint calls;

unsigned gpu_count(void)
{
    const char *count = profile_text("count");
    unsigned long number = 0, later, from;
    int read = count ? sscanf(count, "%lu,%lu@%lu", &number, &later, &from) : 0;
    if (read == 3 && atomic_load(&calls) >= from)
        number = later;
    return number < MAX_GPUS ? (unsigned)number : MAX_GPUS;
}

struct gpu *gpu_at(unsigned index)
{
    return &gpus[index];
}

/* NULL for anything that this library never handed out. */
const struct gpu *gpu_of_handle(const void *handle)
{
    uintptr_t offset = (uintptr_t)handle - (uintptr_t)gpus;
    bool ours = offset < sizeof gpus && offset % sizeof *gpus == 0;
    return ours ? &gpus[offset / sizeof *gpus] : NULL;
}

bool gpu_is_lost(const struct gpu *gpu)
{
    return fault_is_final(gpu);
}

/* The simulated driver is "BRANCH.RELEASE..." or newer. */
bool driver_at_least(unsigned branch, unsigned release)
{
    const char *driver = driver_version();
    char *rest;
    unsigned long have = strtoul(driver ? driver : "0", &rest, 10);
    unsigned long minor = *rest == '.' ? strtoul(rest + 1, NULL, 10) : 0;
    return have > branch || (have == branch && minor >= release);
}

static int compare_function(const void *name, const void *entry)
{
    return strcmp(name, ((const struct first_driver *)entry)->function);
}

static bool driver_has(const char *function)
{
    const struct first_driver *first = bsearch(
        function, history, sizeof history / sizeof *history, sizeof *history, compare_function);
    return !first || driver_at_least(first->branch, first->release);
}

static void sleep_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static int faults_of(const char *function, const struct gpu *gpu)
{
    if (fault_crash(gpu, function))
        raise(SIGSEGV);
    double seconds = fault_hang(gpu, function);
    if (seconds > 0)
        sleep_for(seconds);
    return fault_code(gpu, function);
}

/* gpu is NULL for a question about the whole machine. */
int gate(const char *function, const struct gpu *gpu)
{
    if (!atomic_load(&users))
        return NVML_UNINITIALIZED;
    atomic_fetch_add(&calls, 1);
    profile_refresh();
    if (!driver_has(function))
        return NVML_FUNCTION_NOT_FOUND;
    if (gpu && gpu->index >= gpu_count())
        return NVML_GPU_IS_LOST; /* the profile's count went down under a live handle */
    return faults_of(function, gpu);
}

int gate_handle(const char *function, const void *handle)
{
    if (!atomic_load(&users))
        return NVML_UNINITIALIZED;
    const struct gpu *gpu = gpu_of_handle(handle);
    return gpu ? gate(function, gpu) : NVML_INVALID_ARGUMENT;
}

/* ---- opening and closing ---- */

NVML_API nvmlInitWithFlags(unsigned flags)
{
    (void)flags; /* "no GPUs is fine" and "attach none": no difference here */
    for (unsigned i = 0; i < MAX_GPUS; i++)
        gpus[i].index = i;
    int opened = profile_open();
    if (opened == NVML_SUCCESS)
        opened = faults_of("nvmlInitWithFlags", NULL);
    if (opened == NVML_SUCCESS)
        opened = driver_open();
    if (opened != NVML_SUCCESS)
        return opened;
    atomic_fetch_add(&users, 1);
    return NVML_SUCCESS;
}

/* The names that C programs are linked against; the Python binding asks for neither. */
NVML_API nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlShutdown(void)
{
    unsigned before = atomic_load(&users);
    while (before && !atomic_compare_exchange_weak(&users, &before, before - 1)) {
    }
    if (before == 1)
        driver_close();
    return before ? NVML_SUCCESS : NVML_UNINITIALIZED;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code)
{
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 5: return "Already Initialized";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires restart";
    case 17: return "The operating system has blocked the request.";
    case 18: return "RM has detected an NVML/RM version mismatch.";
    case 19: return "In use by another client";
    case 20: return "Insufficient Memory";
    case 21: return "No data";
    case 23: return "Insufficient Resources";
    case 25: return "Argument Version Mismatch";
    case 26: return "Deprecated";
    case 27: return "Not Ready";
    case 28: return "GPU Not Found";
    case 29: return "Invalid State";
    default: return "Unknown Error";
    }
}

/* ---- versions ---- */

NVML_API nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    ENTER();
    return answer_text(out, size, driver_version());
}

/* The library's own version, which it tells unopened: it counts as CUDA's major version, then the
 * driver it came with: "12.570.124.06". That is the loaded driver, unless somebody installed
 * another: system.library. */
NVML_API nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    char version[96];
    if (!atomic_load(&users))
        profile_open();
    int failed = faults_of(__func__, NULL);
    const char *own = library_version();
    if (failed != NVML_SUCCESS || !own)
        return failed != NVML_SUCCESS ? failed : NVML_UNKNOWN;
    snprintf(version, sizeof version, "%d.%s", driver_cuda() / 1000, own);
    return answer_text(out, size, version);
}

static int cuda_version(int *out)
{
    int cuda = driver_cuda();
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!cuda)
        return NVML_NOT_SUPPORTED;
    *out = cuda;
    return NVML_SUCCESS;
}

NVML_API nvmlSystemGetCudaDriverVersion(int *out)
{
    ENTER();
    return cuda_version(out);
}

NVML_API nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    ENTER();
    return cuda_version(out);
}

/* "r570_00", the form that NVIDIA's driver answers in. */
NVML_API nvmlSystemGetDriverBranch(struct nvmlSystemDriverBranchInfo_v1 *out, unsigned size)
{
    ENTER();
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (out->version != STRUCT_VERSION(nvmlSystemDriverBranchInfo_v1, 1))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    char branch[32];
    snprintf(branch, sizeof branch, "r%lu_00", strtoul(driver_version(), NULL, 10));
    return answer_text(out->branch, size < sizeof out->branch ? size : sizeof out->branch, branch);
}

NVML_API nvmlSystemGetConfComputeState(struct nvmlConfComputeSystemState *out)
{
    ENTER();
    const char *feature = profile_text("system.conf_compute");
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (!feature)
        return NVML_NOT_SUPPORTED;
    *out = (struct nvmlConfComputeSystemState){0, (unsigned)strtoul(feature, NULL, 0), 0};
    return NVML_SUCCESS;
}

/* ---- coming by a GPU ---- */

NVML_API nvmlDeviceGetCount_v2(unsigned *out)
{
    ENTER();
    return answer_unsigned(out, gpu_count());
}

/* One pass of the gate for each call, with the GPU where there is one: a fault that counts calls
 * must not count this one twice. */
static int hand_out(const char *function, unsigned index, struct gpu **out)
{
    int refused = gate(function, gpu_at(index));
    if (refused != NVML_SUCCESS)
        return refused;
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = gpu_at(index);
    return NVML_SUCCESS;
}

NVML_API nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **out)
{
    profile_refresh();
    if (index < gpu_count())
        return hand_out(__func__, index, out);
    ENTER();
    return NVML_INVALID_ARGUMENT;
}

static int hand_out_by(const char *function, const char *key, const char *value, struct gpu **out)
{
    profile_refresh();
    for (unsigned i = 0; value && i < gpu_count(); i++) {
        const char *own = gpu_text(gpu_at(i), key);
        if (own && strcasecmp(own, value) == 0)
            return hand_out(function, i, out);
    }
    int refused = gate(function, NULL);
    if (refused != NVML_SUCCESS)
        return refused;
    return value ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

NVML_API nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **out)
{
    return hand_out_by(__func__, "uuid", uuid, out);
}

NVML_API nvmlDeviceGetHandleBySerial(const char *serial, struct gpu **out)
{
    return hand_out_by(__func__, "serial", serial, out);
}

/* "0000:18:00.0" and "00000000:18:00.0" name the same place. */
NVML_API nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct gpu **out)
{
    struct nvmlPciInfo wanted, own;
    profile_refresh();
    bool readable = pci_info(bus_id, 0, 0, &wanted) == NVML_SUCCESS;
    for (unsigned i = 0; readable && i < gpu_count(); i++)
        if (pci_info(gpu_text(gpu_at(i), "busid"), 0, 0, &own) == NVML_SUCCESS &&
            strcmp(own.busId, wanted.busId) == 0)
            return hand_out(__func__, i, out);
    ENTER();
    return readable ? NVML_NOT_FOUND : NVML_INVALID_ARGUMENT;
}

/* GPUs that NVreg_ExcludedGpus hides: excluded.N = BUSID,UUID */
static const char *excluded(unsigned index)
{
    char key[32];
    snprintf(key, sizeof key, "excluded.%u", index);
    return profile_text(key);
}

NVML_API nvmlGetExcludedDeviceCount(unsigned *out)
{
    unsigned count = 0;
    ENTER();
    while (excluded(count))
        count++;
    return answer_unsigned(out, count);
}

NVML_API nvmlGetExcludedDeviceInfoByIndex(unsigned index, struct nvmlExcludedDeviceInfo *out)
{
    ENTER();
    const char *entry = excluded(index);
    if (!entry || !out)
        return NVML_INVALID_ARGUMENT;
    const char *comma = strchr(entry, ',');
    memset(out, 0, sizeof *out);
    snprintf(out->uuid, sizeof out->uuid, "%s", comma ? comma + 1 : "");
    return pci_info(entry, 0, 0, &out->pciInfo);
}

/* ---- every function that is not written: the generated stubs end here ---- */

int answer_stub(const char *function, const void *first_argument);

/* The first argument is a GPU for most of NVML; for the others it is no address of ours. */
int answer_stub(const char *function, const void *first_argument)
{
    int refused = gate(function, gpu_of_handle(first_argument));
    return refused != NVML_SUCCESS ? refused : NVML_NOT_SUPPORTED;
}
