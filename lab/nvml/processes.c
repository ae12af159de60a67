/* Who uses a GPU: proc.N = PID,MIB[,NAME] for compute, graphics.N for the others.
 * "-" for MIB is memory that the driver does not know. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define UNKNOWN_MEMORY (~0ull)
#define NO_INSTANCE (~0u) /* not inside a MIG instance */

struct process {
    unsigned pid;
    unsigned long long memory; /* bytes */
    const char *name;
};

static bool process_at(const struct gpu *gpu, const char *kind, unsigned number,
                       struct process *out)
{
    char key[32];
    snprintf(key, sizeof key, "%s.%u", kind, number);
    const char *text = gpu_text(gpu, key);
    if (!text)
        return false;
    char *rest;
    *out = (struct process){(unsigned)strtoul(text, &rest, 10), UNKNOWN_MEMORY, NULL};
    if (*rest == ',' && rest[1] != '-')
        out->memory = strtoull(rest + 1, NULL, 10) << 20;
    const char *comma = *rest == ',' ? strchr(rest + 1, ',') : NULL;
    out->name = comma ? comma + 1 : NULL;
    return true;
}

unsigned long long processes_memory(const struct gpu *gpu)
{
    static const char *const kinds[] = {"proc", "graphics"};
    unsigned long long sum = 0;
    struct process process;
    for (unsigned kind = 0; kind < 2; kind++)
        for (unsigned i = 0; process_at(gpu, kinds[kind], i, &process); i++)
            sum += process.memory == UNKNOWN_MEMORY ? 0 : process.memory;
    return sum;
}

/* Called twice: once for the number, once with room for all. */
static int list(const struct gpu *gpu, const char *kind, unsigned *count,
                struct nvmlProcessInfo *out)
{
    struct process process;
    unsigned found = 0;
    if (!count)
        return NVML_INVALID_ARGUMENT;
    while (process_at(gpu, kind, found, &process))
        found++;
    bool fits = !found || (out && found <= *count);
    *count = found;
    if (!fits)
        return NVML_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < found && process_at(gpu, kind, i, &process); i++)
        out[i] = (struct nvmlProcessInfo){process.pid, process.memory, NO_INSTANCE, NO_INSTANCE};
    return NVML_SUCCESS;
}

/* Versions 2 and 3 share one structure; 3 came with R510. */
#define PROCESS_LIST(function, kind)                                                       \
    NVML_API function(const struct gpu *gpu, unsigned *count, struct nvmlProcessInfo *out) \
    {                                                                                      \
        ENTER_GPU(gpu);                                                                    \
        return list(gpu, kind, count, out);                                                \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "proc")
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "proc")
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")

static bool name_in_profile(unsigned pid, const char **name)
{
    static const char *const kinds[] = {"proc", "graphics", "mps"};
    struct process process;
    for (unsigned g = 0; g < gpu_count(); g++)
        for (unsigned kind = 0; kind < 3; kind++)
            for (unsigned i = 0; process_at(gpu_at(g), kinds[kind], i, &process); i++)
                if (process.pid == pid && process.name) {
                    *name = process.name;
                    return true;
                }
    return false;
}

/* The profile's name, else what the kernel says of a process that is really there. */
NVML_API nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size)
{
    char path[64], command[256] = "";
    const char *name = command;
    ENTER();
    if (!name_in_profile(pid, &name)) {
        snprintf(path, sizeof path, "/proc/%u/comm", pid);
        FILE *file = fopen(path, "re");
        if (!file)
            return NVML_NOT_FOUND;
        if (!fgets(command, sizeof command, file))
            command[0] = '\0';
        fclose(file);
        command[strcspn(command, "\n")] = '\0';
    }
    return answer_text(out, size, name);
}

/* No samples of utilisation by process are kept. */
NVML_API nvmlDeviceGetProcessUtilization(const struct gpu *gpu, void *out, unsigned *count,
                                         unsigned long long since)
{
    ENTER_GPU(gpu);
    (void)out;
    (void)since;
    int answered = answer_unsigned(count, 0);
    return answered == NVML_SUCCESS ? NVML_NOT_FOUND : answered;
}
