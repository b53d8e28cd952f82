// The CUDA runtime without a device: memory is address space, small copies are made, kernels are not run.
//
// Queries about the device are answered as in device.h. Device memory is host memory: data that the host wrote there can
// be read back; everything else reads as zeros or as earlier content. answers.toml lists the functions that have nothing
// to do: those that launch, wait, free or record.
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "device.h"
using namespace rehearsal;

#define OK cudaSuccess
static const size_t COPIES = (size_t)number("REHEARSAL_COPY_BYTES", 4L << 20);  // larger blocks are not copied

static thread_local cudaError_t last = OK;
static thread_local int current = 0;  // as CUDA numbers the visible devices
static cudaError_t fail(cudaError_t error) { return last = error; }
static int device() { return at(current) < 0 ? 0 : at(current); }

struct Block {
    size_t bytes, taken;  // mapped bytes, and how many of them count as the device's
    int device;           // as NVML numbers it
    bool host;            // pinned memory of the host
};
static std::mutex guard;
static std::map<uintptr_t, Block> blocks;  // by address: cudaMalloc's and cudaHostAlloc's

static const Block* block_of(const void* address) {
    auto after = blocks.upper_bound((uintptr_t)address);
    if (after == blocks.begin()) return nullptr;
    auto& [start, block] = *--after;
    return (uintptr_t)address < start + block.bytes ? &block : nullptr;
}

extern "C" {

// --- devices

cudaError_t cudaGetDeviceCount(int* count) {
    *count = (int)visible().size();
    return *count ? OK : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* number) { *number = current; return OK; }
cudaError_t cudaSetDevice(int number) {
    if (at(number) < 0) return fail(cudaErrorInvalidDevice);
    current = number;
    return OK;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int number) {
    if (at(number) < 0) return fail(cudaErrorInvalidDevice);
    auto limit = limits();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", rehearsal::name());
    uuid(at(number), (unsigned char*)&p->uuid);
    p->totalGlobalMem = total_bytes();
    p->major = capability() / 10, p->minor = capability() % 10;
    p->multiProcessorCount = limit.multiprocessors;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = limit.shared_opt_in;
    p->sharedMemPerMultiprocessor = limit.shared_per_multiprocessor, p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = limit.threads_per_multiprocessor;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->l2CacheSize = limit.l2_bytes, p->memoryBusWidth = 5120, p->maxBlocksPerMultiProcessor = 32;
    p->totalConstMem = 65536, p->textureAlignment = 512, p->texturePitchAlignment = 32;
    p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = p->concurrentKernels = 1;
    p->asyncEngineCount = 2, p->canMapHostMemory = 1, p->cooperativeLaunch = 1, p->streamPrioritiesSupported = 1;
    p->pciBusID = at(number) + 1;
    return OK;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
    cudaDeviceProp p;
    if (cudaError_t error = cudaGetDeviceProperties(&p, number)) return error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
        case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
        case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; break;
        case cudaDevAttrReservedSharedMemoryPerBlock: *value = (int)p.reservedSharedMemPerBlock; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        case cudaDevAttrClockRate: *value = 1410000; break;
        case cudaDevAttrMemoryClockRate: *value = 1593000; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; break;
        case cudaDevAttrPciBusId: *value = p.pciBusID; break;
        case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess:
        case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory: case cudaDevAttrStreamPrioritiesSupported:
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        default: *value = 0;
    }
    return OK;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int number) {
    if (at(number) < 0) return fail(cudaErrorInvalidDevice);
    snprintf(text, length, "0000:%02x:00.0", at(number) + 1);
    return OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return OK;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return OK; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return OK; }
cudaError_t cudaGetLastError() { cudaError_t error = last; last = OK; return error; }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) {
    return error == OK ? "cudaSuccess" : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) { return error_text(error); }

// --- memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { memory(device(), true, free, total); return OK; }

static cudaError_t map(void** pointer, size_t bytes, size_t taken, int device, bool host) {
    *pointer = nullptr;
    if (taken && !take(device, taken)) return fail(cudaErrorMemoryAllocation);
    if (!bytes) bytes = 1;
    void* address = reserve(bytes);
    if (!address) {
        if (taken) give(device, taken);
        return fail(cudaErrorMemoryAllocation);
    }
    std::lock_guard<std::mutex> lock(guard);
    blocks[(uintptr_t)address] = {bytes, taken, device, host};
    *pointer = address;
    return OK;
}
static cudaError_t unmap(void* pointer) {
    if (!pointer) return OK;
    std::lock_guard<std::mutex> lock(guard);
    auto found = blocks.find((uintptr_t)pointer);
    if (found == blocks.end()) return fail(cudaErrorInvalidValue);
    if (found->second.taken) give(found->second.device, found->second.taken);
    munmap(pointer, found->second.bytes);
    blocks.erase(found);
    return OK;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    size_t whole = (bytes + (2u << 20) - 1) & ~(size_t)((2u << 20) - 1);  // the driver allocates pages of 2 MiB
    *pointer = nullptr;
    return bytes ? map(pointer, whole, whole, device(), false) : OK;
}
cudaError_t cudaFree(void* pointer) { return unmap(pointer); }
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return unmap(pointer); }
// Managed memory may be on the host, so it does not count as the device's.
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return map(pointer, bytes, 0, device(), false); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return map(pointer, bytes, 0, 0, true); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) { return unmap(pointer); }
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(guard);
    blocks[(uintptr_t)pointer] = {bytes, 0, 0, true};
    return OK;
}
cudaError_t cudaHostUnregister(void* pointer) {
    std::lock_guard<std::mutex> lock(guard);
    blocks.erase((uintptr_t)pointer);
    return OK;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
    memset(found, 0, sizeof *found);
    std::lock_guard<std::mutex> lock(guard);
    const Block* block = block_of(pointer);
    found->type = !block ? cudaMemoryTypeUnregistered : block->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    auto shown = visible();
    for (int i = 0; block && i < (int)shown.size(); i++)
        if (shown[i] == block->device) found->device = i;
    found->devicePointer = found->hostPointer = (void*)pointer;
    return OK;
}

static cudaError_t copy(void* to, const void* from, size_t bytes) {
    if (bytes <= COPIES && to && from) memmove(to, from, bytes);
    return OK;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; width * rows <= COPIES && row < rows; row++)
        memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
    return OK;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    if (bytes <= COPIES) memset(to, value, bytes);
    return OK;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
    static char symbol[1 << 20];
    *pointer = symbol;
    return OK;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = (cudaMemPool_t)handle(); return OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) { *(uint64_t*)value = 0; return OK; }

// --- streams and events: all work is done at once

cudaError_t cudaStreamCreate(cudaStream_t* stream) { *stream = (cudaStream_t)handle(); return OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return OK; }
// Graphs: a stream is captured if the capture began on it, or if it has waited for an event of a captured stream. The
// program's own code runs once and allocates as on a card; a replay has nothing to do.
static std::atomic<unsigned long long> captured{0};  // the number of the capture under way; 0: none
static std::set<cudaStream_t> streams;               // of this capture
static std::set<cudaEvent_t> events;                 // recorded by these streams
static cudaStreamCaptureStatus capturing(cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(guard);
    return streams.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    static std::atomic<unsigned long long> last{0};
    std::lock_guard<std::mutex> lock(guard);
    captured = ++last;
    streams = {stream};
    return OK;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    std::lock_guard<std::mutex> lock(guard);
    captured = 0;
    streams.clear();
    events.clear();
    *graph = (cudaGraph_t)handle();
    return OK;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    std::lock_guard<std::mutex> lock(guard);
    streams.count(stream) ? (void)events.insert(event) : (void)events.erase(event);
    return OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::lock_guard<std::mutex> lock(guard);
    if (events.count(event)) streams.insert(stream);
    return OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capturing(stream);
    return OK;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
    if (edges) *edges = nullptr;
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* count) {
#endif
    *status = capturing(stream);
    if (id) *id = captured;
    if (graph) *graph = (cudaGraph_t)handle();
    if (nodes) *nodes = nullptr;
    if (count) *count = 0;
    return OK;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t, unsigned long long) {
    *made = (cudaGraphExec_t)handle();
    return OK;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(made, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { *count = 1; return OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
    call(stream, OK, data);
    return OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { call(data); return OK; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { *event = (cudaEvent_t)handle(); return OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { *milliseconds = 1; return OK; }

// --- CUPTI: see answers.toml

int cuptiGetVersion(uint32_t* version) { *version = CUDART_VERSION / 1000 * 10000; return 0; }
int cuptiGetResultString(int, const char** text) { *text = "not answered in a rehearsal"; return 0; }
int cuptiSubscribe(void** subscriber, void*, void*) { *subscriber = (void*)handle(); return 0; }

// --- kernels: found, queried, launched, but never run

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->maxDynamicSharedSizeBytes = 49152;
    int const built[] = {ARCHITECTURES};  // capabilities that torch's kernels are compiled for, ascending
    found->binaryVersion = built[0];      // the newest kernel that is not newer than the device runs on it
    for (int each : built) if (each <= capability()) found->binaryVersion = each;
    found->ptxVersion = found->binaryVersion;
    return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    *blocks = 2;
    return OK;
}
#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
    *library = (cudaLibrary_t)handle();
    return OK;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char*) {
    *kernel = (cudaKernel_t)handle();
    return OK;
}
#endif

// Functions that the compiler calls in every library with kernels.
static thread_local struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configuration = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(cudaStream_t*)stream = configuration.stream;
    return OK;
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return OK; }
void** __cudaRegisterFatBinary(void*) {
    static void* handles[4];
    return handles;
}
char __cudaInitModule(void**) { return 1; }

}  // extern "C"
