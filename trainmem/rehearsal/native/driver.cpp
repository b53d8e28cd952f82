// The part of the CUDA driver that torch, Triton's search for a device and this package's own query of the machine use:
// properties of the devices, and memory that is reserved and mapped separately (torch's expandable segments).
#include <cuda.h>
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "device.h"
using namespace rehearsal;

#define OK CUDA_SUCCESS

static std::mutex guard;
static std::map<CUmemGenericAllocationHandle, std::pair<int, size_t>> made;  // (device, bytes) of cuMemCreate's handles

extern "C" {

CUresult cuInit(unsigned) { return visible().empty() ? CUDA_ERROR_NO_DEVICE : OK; }
CUresult cuDriverGetVersion(int* version) { *version = CUDA_VERSION; return OK; }
CUresult cuGetErrorString(CUresult error, const char** text) { *text = error_text(error); return OK; }
CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = error == OK ? "CUDA_SUCCESS" : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
    return OK;
}

CUresult cuDeviceGetCount(int* count) { *count = (int)visible().size(); return OK; }
CUresult cuDeviceGet(CUdevice* device, int number) { *device = number; return at(number) < 0 ? CUDA_ERROR_INVALID_DEVICE : OK; }
CUresult cuDeviceGetName(char* text, int length, CUdevice) { snprintf(text, length, "%s", rehearsal::name()); return OK; }
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { *bytes = total_bytes(); return OK; }
CUresult cuDeviceGetUuid_v2(CUuuid* bytes, CUdevice device) { uuid(at(device), (unsigned char*)bytes); return OK; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    auto limit = limits();
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability() / 10; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability() % 10; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = limit.multiprocessors; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = limit.shared_opt_in; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
        default: *value = 0;
    }
    return OK;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return OK;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { *context = (CUcontext)handle(); return OK; }
CUresult cuCtxGetCurrent(CUcontext* context) {
    static void* only = handle();
    *context = (CUcontext)only;
    return OK;
}
CUresult cuCtxGetDevice(CUdevice* device) { *device = 0; return OK; }
CUresult cuMemGetInfo_v2(size_t* free, size_t* total) { memory(at(0), true, free, total); return OK; }

// --- memory in two steps: addresses are reserved once, memory is created and mapped to them

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = 2u << 20;
    return OK;
}
CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    *pointer = (CUdeviceptr)reserve(bytes);
    return *pointer ? OK : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) { munmap((void*)pointer, bytes); return OK; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* created, size_t bytes, const CUmemAllocationProp* what, unsigned long long) {
    int device = at(what->location.id);
    if (!take(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::lock_guard<std::mutex> lock(guard);
    *created = (CUmemGenericAllocationHandle)handle();
    made[*created] = {device, bytes};
    return OK;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle created) {
    std::lock_guard<std::mutex> lock(guard);
    auto found = made.find(created);
    if (found == made.end()) return CUDA_ERROR_INVALID_VALUE;
    give(found->second.first, found->second.second);
    made.erase(found);
    return OK;
}

// --- kernels that Triton compiled: loaded, queried, launched (see answers.toml), but never run

CUresult cuModuleLoad(CUmodule* module, const char*) { *module = (CUmodule)handle(); return OK; }
CUresult cuModuleLoadData(CUmodule* module, const void*) { *module = (CUmodule)handle(); return OK; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) { *function = (CUfunction)handle(); return OK; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return OK;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
    *(CUdeviceptr*)value = pointer;
    return OK;
}

// --- functions by name: this library's own, or else one that returns "not supported" (written by build.py)

CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
    std::string plain = name;
    *function = dlsym(RTLD_DEFAULT, (plain + "_v2").c_str());
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? OK : CUDA_ERROR_NOT_FOUND;
}
// The runtime's function for the same (returns a cudaError_t, 0 if found).
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long, int* found) {
    CUdriverProcAddressQueryResult result;
    CUresult error = cuGetProcAddress_v2(name, function, (int)version, 0, &result);
    if (found) *found = error == OK ? 0 : 1;
    return error == OK ? 0 : 500;
}
int cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* found) {
    return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}

}  // extern "C"
