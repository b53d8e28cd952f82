// The NVML functions that nvidia-ml-py, nvidia-smi and torch's out-of-memory message call. Values that only a driver knows
// (power, clocks, links) are "not supported", as on many real machines.
#include "device.h"
using namespace rehearsal;

typedef void* Device;  // a device's number plus one
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static int number_of(Device device) { return (int)(intptr_t)device - 1; }
static int found(int number, Device* device) {
    if (number < 0 || number >= devices()) return NOT_FOUND;
    *device = (Device)(intptr_t)(number + 1);
    return OK;
}

struct Memory { unsigned long long total, free, used; };
struct MemoryV2 { unsigned version; unsigned long long total, reserved, free, used; };
struct Process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

extern "C" {

const char* nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : error == NOT_FOUND ? "Not Found" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) { snprintf(text, length, "rehearsal"); return OK; }
int nvmlSystemGetNVMLVersion(char* text, unsigned length) { snprintf(text, length, "rehearsal"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return OK; }

int nvmlDeviceGetCount_v2(unsigned* count) { *count = devices(); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device* device) { return found((int)index, device); }
int nvmlDeviceGetHandleByUUID(const char* text, Device* device) {
    for (int i = 0; i < devices(); i++)
        if (uuid_text(i) == text) return found(i, device);
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* text, Device* device) {
    const char* bus = strchr(text, ':');
    return bus ? found((int)strtol(bus + 1, nullptr, 16) - 1, device) : INVALID;
}
int nvmlDeviceGetIndex(Device device, unsigned* index) { *index = number_of(device); return OK; }
int nvmlDeviceGetName(Device, char* text, unsigned length) { snprintf(text, length, "%s", rehearsal::name()); return OK; }
int nvmlDeviceGetUUID(Device device, char* text, unsigned length) {
    snprintf(text, length, "%s", uuid_text(number_of(device)).c_str());
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(Device, int* major, int* minor) {
    *major = capability() / 10, *minor = capability() % 10;
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device device, Memory* memory) {
    Locked lock;
    memory->total = total_bytes() + DRIVER_RESERVE;
    memory->used = used_bytes(number_of(device)) + DRIVER_RESERVE;
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2* memory) {
    Locked lock;
    memory->total = total_bytes() + DRIVER_RESERVE, memory->reserved = DRIVER_RESERVE;
    memory->used = used_bytes(number_of(device));
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
// *count: in, the length of the list; out, the number of processes. Returns 7 if the list is too short.
static int processes(Device device, unsigned* count, Process* list) {
    Locked lock;
    unsigned there = 0, room = *count;
    for (int i = 0; i < ROWS; i++) {
        const Row& row = ledger()[i];
        if (row.device != number_of(device) || !alive(row.pid)) continue;
        if (there++ < room && list) list[there - 1] = {(unsigned)row.pid, row.bytes + context_bytes(), 0, 0};
    }
    *count = there;
    return there > room ? 7 : OK;
}
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned* count, Process* list) { return processes(device, count, list); }
int nvmlDeviceGetComputeRunningProcesses_v2(Device device, unsigned* count, Process* list) { return processes(device, count, list); }
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned* count, Process* list) { return processes(device, count, list); }

// Their older names, which torch.cuda.device_count() calls: otherwise it would start CUDA itself, and no fork could use a
// device afterwards.
int nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex(unsigned index, Device* device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetHandleByPciBusId(const char* text, Device* device) {
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}

// Nothing runs on a device: what a card that works would take, and its temperature, are 0.
int nvmlDeviceGetUtilizationRates(Device, unsigned* gpu_and_memory) { return gpu_and_memory[0] = gpu_and_memory[1] = OK; }
int nvmlDeviceGetPowerUsage(Device, unsigned* milliwatts) { return *milliwatts = OK; }
int nvmlDeviceGetTemperature(Device, int, unsigned* degrees) { return *degrees = OK; }
int nvmlDeviceGetClockInfo(Device, int, unsigned* megahertz) { return *megahertz = OK; }
int nvmlDeviceGetTotalEnergyConsumption(Device, unsigned long long* millijoules) { return *millijoules = OK; }

}  // extern "C"
