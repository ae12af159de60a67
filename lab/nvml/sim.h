/* What the simulator's files share: the profile, the gate that every call passes, and answers. */
#ifndef GPUFLEET_NVML_SIM_H
#define GPUFLEET_NVML_SIM_H

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"

/* An exported function of the library.  The build scans for this word to learn which symbols are
 * written by hand, so it always stands at the beginning of a line, before the name. */
#define NVML_API __attribute__((visibility("default"))) int

#define MAX_GPUS 64

/* What callers hold as nvmlDevice_t. */
struct gpu {
    unsigned index;
};

/* ---- profile.c: the hardware, as "key = value" lines ---- */

int profile_open(void);
void profile_refresh(void);
const char *profile_text(const char *key);
const char *gpu_text(const struct gpu *gpu, const char *key);
bool gpu_has(const struct gpu *gpu, const char *key);
long long gpu_number(const struct gpu *gpu, const char *key, long long otherwise);
long long gpu_next_number(const struct gpu *gpu, const char *key, long long otherwise);
int fault_code(const struct gpu *gpu, const char *function);
bool fault_is_final(const struct gpu *gpu);
double fault_hang(const struct gpu *gpu, const char *function);
bool fault_crash(const struct gpu *gpu, const char *function);
int state_write(const struct gpu *gpu, const char *key, unsigned long long value);

/* ---- library.c: the GPUs that are there, and who may ask ---- */

unsigned gpu_count(void);
struct gpu *gpu_at(unsigned index);
const struct gpu *gpu_of_handle(const void *handle);
bool gpu_is_lost(const struct gpu *gpu);
bool driver_at_least(unsigned branch, unsigned release);
int gate(const char *function, const struct gpu *gpu);
int gate_handle(const char *function, const void *handle);

int answer_stub(const char *function, const void *first_argument);

/* Every exported function begins with one of these two: not initialised, unknown to this driver's
 * branch, lost, made to fail, hang or crash by the profile. */
#define ENTER()                                          \
    do {                                                 \
        int refused_ = gate(__func__, NULL);             \
        if (refused_ != NVML_SUCCESS) return refused_;   \
    } while (0)

#define ENTER_GPU(handle)                                \
    do {                                                 \
        int refused_ = gate_handle(__func__, (handle));  \
        if (refused_ != NVML_SUCCESS) return refused_;   \
    } while (0)

/* ---- driver.c: the versions of the library and of what is loaded ---- */

const char *library_version(void);
const char *driver_version(void);
int driver_cuda(void);
int driver_open(void);
void driver_close(void);

/* ---- answer.c: from profile values to C results ---- */

int answer_text(char *out, unsigned size, const char *text);
int answer_number(const struct gpu *gpu, const char *key, unsigned *out);
int answer_unsigned(unsigned *out, unsigned long long value);
bool list_contains(const char *list, unsigned wanted);
void list_to_mask(const char *list, unsigned long words, unsigned long *mask);

/* A getter that reads one key: the value, or NOT_SUPPORTED where the profile has none. */
#define TEXT_GETTER(function, key)                                          \
    NVML_API function(const struct gpu *gpu, char *out, unsigned size)      \
    {                                                                       \
        ENTER_GPU(gpu);                                                     \
        return answer_text(out, size, gpu_text(gpu, key));                  \
    }

#define NUMBER_GETTER(function, key)                                        \
    NVML_API function(const struct gpu *gpu, unsigned *out)                 \
    {                                                                       \
        ENTER_GPU(gpu);                                                     \
        return answer_number(gpu, key, out);                                \
    }

/* ---- facts that more than one file needs ---- */

int pci_info(const char *bus_id, unsigned device_id, unsigned subsystem, struct nvmlPciInfo *out);
unsigned long long processes_memory(const struct gpu *gpu);
unsigned nvlink_count(const struct gpu *gpu);
bool nvlink_is_up(const struct gpu *gpu, unsigned link);
unsigned nvlink_state(const struct gpu *gpu, unsigned link);
unsigned nvlink_switch_links(const struct gpu *gpu);
unsigned nvlink_width(const struct gpu *a, const struct gpu *b);
unsigned long long nvlink_errors(const struct gpu *gpu, const char *kind, unsigned link);
bool fabric_is_ready(const struct gpu *gpu);

#endif
