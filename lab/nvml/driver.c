/* Which driver this library is of, and which one is loaded.
 *
 * A profile usually says both: "system.driver". Where it names a file that holds the version of the
 * loaded module, "system.loaded", both are found out instead, as the real library does: its own
 * version is in its file's name, and it opens only if the loaded module has the same one. */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

/* Highest CUDA version of a branch and later ones: the toolkit it came out with; 535 assumed. */
static const struct {
    unsigned long branch;
    int cuda;
} cuda_versions[] = {{615, 13040}, {610, 13030}, {595, 13020}, {590, 13010},
                     {580, 13000}, {575, 12090}, {570, 12080}, {535, 12020}};

#define CUDA_VERSIONS (sizeof cuda_versions / sizeof *cuda_versions)

static int device = -1;

/* "580.95.05" of libnvidia-ml.so.580.95.05, whatever link to it was opened; NULL for a file that
 * has no such name. */
static const char *version_of_file(void)
{
    static char path[PATH_MAX];
    Dl_info self;
    if (!dladdr((void *)&version_of_file, &self) || !realpath(self.dli_fname, path))
        return NULL;
    char *version = strstr(path, ".so.");
    return version && strchr(version + 4, '.') ? version + 4 : NULL;
}

const char *library_version(void)
{
    const char *said = profile_text("system.library");
    const char *own = !said && profile_text("system.loaded") ? version_of_file() : NULL;
    return said ? said : own ? own : profile_text("system.driver");
}

const char *driver_version(void)
{
    const char *own = profile_text("system.loaded") ? version_of_file() : NULL;
    return own ? own : profile_text("system.driver"); /* opened, so the loaded one is the same */
}

/* 0 where nobody knows. */
int driver_cuda(void)
{
    const char *said = profile_text("system.cuda");
    if (!profile_text("system.loaded"))
        return said ? (int)strtol(said, NULL, 0) : 0;
    unsigned long branch = strtoul(library_version(), NULL, 10);
    for (size_t i = 0; i < CUDA_VERSIONS; i++)
        if (branch >= cuda_versions[i].branch)
            return cuda_versions[i].cuda;
    return said ? (int)strtol(said, NULL, 0) : 0;
}

/* Whether the driver that is loaded lets this library in. */
int driver_open(void)
{
    char loaded[64] = "";
    const char *path = profile_text("system.loaded"), *node = profile_text("system.device");
    if (!path)
        return NVML_SUCCESS;
    FILE *file = fopen(path, "re");
    if (!file)
        return NVML_DRIVER_NOT_LOADED;
    if (fgets(loaded, sizeof loaded, file))
        loaded[strcspn(loaded, "\n")] = '\0';
    fclose(file);
    if (strcmp(loaded, library_version()) != 0)
        return NVML_LIB_RM_VERSION_MISMATCH;
    /* Held as long as the library is open: a module in use cannot be unloaded. */
    if (node && device < 0)
        device = open(node, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return NVML_SUCCESS;
}

void driver_close(void)
{
    if (device >= 0)
        close(device);
    device = -1;
}
