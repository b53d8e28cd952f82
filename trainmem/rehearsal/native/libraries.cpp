// The functions of cuBLAS, cuDNN and NCCL whose results torch or bitsandbytes read. The others are in answers.toml.
#include <dlfcn.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"
using namespace rehearsal;

template <class T> static void scale(T* numbers, size_t count, int by) {
    for (size_t i = 0; i < count; i++) numbers[i] *= (T)by;
}

extern "C" {

// --- cuBLAS and cuBLASLt: handles, and one algorithm without a workspace (torch allocates its own workspace before)

int cublasCreate_v2(void** made) { *made = handle(); return 0; }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
int cublasGetVersion_v2(void*, int* version) { *version = 130101; return 0; }
size_t cublasLtGetVersion() { return 130101; }
int cublasLtCreate(void** made) { *made = handle(); return 0; }
int cublasLtMatmulDescCreate(void** made, int, int) { *made = handle(); return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { *made = handle(); return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { *made = handle(); return 0; }
struct Heuristic { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* found, int* count) {
    *found = {};
    *count = 1;
    return 0;
}
// torch 2.14 and newer create an algorithm by its number and check it.
int cublasLtMatmulAlgoInit(void*, int, int, int, int, int, int, int, uint64_t* algorithm) {
    memset(algorithm, 0, sizeof Heuristic::algorithm);
    return 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(const void*, int, void* to, size_t bytes, size_t* written) {
    if (to) memset(to, 0, bytes);
    if (written) *written = bytes;
    return 0;
}
int cublasLtMatmulAlgoCheck(void*, void*, void*, void*, void*, void*, const void*, Heuristic* found) {
    *found = {};
    return 0;
}

// --- cuDNN's graph interface: descriptors that store their attributes. A search for engines finds one that needs no
// workspace; torch's front end calculates by itself what it allocates for intermediate results.

struct Attribute { int type; int64_t count; std::vector<char> bytes; };
struct Descriptor { int kind; std::map<int, Attribute> attributes; };
enum { ENGINEHEUR_RESULTS = 202, GRAPH_ENGINES = 802 };
enum { TYPE_INT64 = 3, TYPE_INT32 = 23 };
static size_t width(int type) {  // bytes of an element, by cudnnBackendAttributeType_t
    switch (type) {
        case 2: case 24: return 1;                                   // boolean, char
        case 0: case 3: case 5: case 6: case 15: case 26: return 8;  // handle, int64, double, pointer, descriptor, fraction
        default: return 4;
    }
}
int cudnnBackendCreateDescriptor(int kind, Descriptor** made) { *made = new Descriptor{kind, {}}; return 0; }
int cudnnBackendDestroyDescriptor(Descriptor* descriptor) { delete descriptor; return 0; }
int cudnnBackendSetAttribute(Descriptor* to, int name, int type, int64_t count, const void* from) {
    const char* bytes = (const char*)from;
    to->attributes[name] = {type, count, bytes ? std::vector<char>(bytes, bytes + count * width(type)) : std::vector<char>()};
    return 0;
}
int cudnnBackendGetAttribute(const Descriptor* from, int name, int type, int64_t room, int64_t* count, void* to) {
    auto stored = from->attributes.find(name);
    if (name == ENGINEHEUR_RESULTS) {  // the caller created the descriptors to fill
        if (count) *count = 1;
    } else if (stored != from->attributes.end()) {
        int64_t given = stored->second.count < room ? stored->second.count : room;
        if (count) *count = stored->second.count;
        if (to && room > 0) memcpy(to, stored->second.bytes.data(), given * width(type));
    } else if (type == TYPE_INT64 || type == TYPE_INT32) {  // workspace, shared memory, engine number: 0
        if (count) *count = 1;
        if (to && room > 0) memset(to, 0, width(type));
        if (to && room > 0 && name == GRAPH_ENGINES) *(int64_t*)to = 64;  // more engines than are selected by number
    } else if (count) {
        *count = 0;  // numerical notes, behaviour notes, knobs: none
    }
    return 0;
}
// Batch norm's older interface: it needs no workspace and keeps nothing for the backward pass.
int cudnnCreateTensorDescriptor(void** made) { *made = handle(); return 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, size_t* size) {
    *size = 0;
    return 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*,
                                                      size_t* size) {
    *size = 0;
    return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* size) {
    *size = 0;
    return 0;
}
int cudnnCreate(void** made) { *made = handle(); return 0; }
int cudnnGetStream(void*, void** stream) { *stream = nullptr; return 0; }
const char* cudnnGetErrorString(int error) { return error ? "not answered in a rehearsal" : "success"; }
void cudnnGetLastErrorString(char* text, size_t length) { snprintf(text, length, "not answered in a rehearsal"); }
size_t cudnnGetCudartVersion() { return 13000; }
// torch chooses its attention kernel by the version: return that of the installed library.
size_t cudnnGetVersion() {
    static size_t version = [] {
        void* library = dlopen("libcudnn.so.9", RTLD_LAZY);
        auto ask = library ? (size_t(*)())dlsym(library, "cudnnGetVersion") : nullptr;
        return ask && ask != cudnnGetVersion ? ask() : (size_t)90000;
    }();
    return version;
}
int cudnnGetProperty(int which, int* value) {
    size_t version = cudnnGetVersion();
    *value = which == 0 ? version / 10000 : which == 1 ? version / 100 % 100 : version % 100;
    return 0;
}

// --- error texts of libraries whose other functions answers.toml refuses: a status instead of a text would crash

const char* cusparseGetErrorString(int) { return "not answered in a rehearsal"; }
const char* cusparseGetErrorName(int) { return "CUSPARSE_STATUS_NOT_SUPPORTED"; }
const char* nvrtcGetErrorString(int) { return "not answered in a rehearsal"; }

// --- cuFFT and cuSPARSE: no workspace, if the rehearsal assumes this (answers.toml has their other functions)

int cufftXtMakePlanMany(int, int, void*, void*, long long, long long, int, void*, long long, long long, int, long long,
                        size_t* size, int) {
    *size = 0;
    return unless_assumed(16);
}
int cusparseSpMM_bufferSize(void*, int, int, const void*, void*, void*, const void*, void*, int, int, size_t* size) {
    *size = 0;
    return unless_assumed(10);
}
int cusparseSpMV_bufferSize(void*, int, const void*, void*, void*, const void*, void*, int, int, size_t* size) {
    *size = 0;
    return unless_assumed(10);
}

// --- NCCL: communicators, and collectives that move small data as if every rank had the same

struct Communicator { int ranks, rank; };
struct UniqueId { char bytes[128]; };
static const size_t SMALL = 1u << 20;
static size_t bytes_of(size_t count, int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return count * widths[type];
}
static void move(void* to, const void* from, size_t bytes) {
    if (to && from && bytes <= SMALL) memmove(to, from, bytes);
}

int ncclGetVersion(int* version) {
    auto ask = (int (*)(int*))dlsym(RTLD_NEXT, "ncclGetVersion");
    if (ask) return ask(version);
    *version = 22700;
    return 0;
}
int ncclGetUniqueId(UniqueId* id) {
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "rehearsal-%d-%p", getpid(), handle());
    return 0;
}
static int join(Communicator** made, int ranks, int rank) { *made = new Communicator{ranks, rank}; return 0; }
int ncclCommInitRank(Communicator** made, int ranks, UniqueId, int rank) { return join(made, ranks, rank); }
int ncclCommInitRankConfig(Communicator** made, int ranks, UniqueId, int rank, void*) { return join(made, ranks, rank); }
int ncclCommInitRankScalable(Communicator** made, int ranks, int rank, int, UniqueId*, void*) { return join(made, ranks, rank); }
int ncclCommInitAll(Communicator** made, int count, const int*) {
    for (int i = 0; i < count; i++) join(&made[i], count, i);
    return 0;
}
int ncclCommSplit(Communicator* from, int, int, Communicator** made, void*) { *made = new Communicator(*from); return 0; }
int ncclCommCount(Communicator* of, int* count) { *count = of->ranks; return 0; }
int ncclCommUserRank(Communicator* of, int* rank) { *rank = of->rank; return 0; }
int ncclCommGetAsyncError(Communicator*, int* error) { *error = 0; return 0; }
int ncclCommDestroy(Communicator* of) { delete of; return 0; }
int ncclCommRegister(Communicator*, void*, size_t, void** made) { *made = handle(); return 0; }
const char* ncclGetErrorString(int) { return "not answered in a rehearsal"; }
const char* ncclGetLastError(Communicator*) { return ""; }
int ncclMemAlloc(void** pointer, size_t bytes) { return ((int (*)(void**, size_t))dlsym(RTLD_DEFAULT, "cudaMalloc"))(pointer, bytes); }
int ncclMemFree(void* pointer) { return ((int (*)(void*))dlsym(RTLD_DEFAULT, "cudaFree"))(pointer); }

// Collectives of one group can be parts of one operation: since 2.15 torch gathers a list of tensors by one broadcast from
// each rank. When the group ends, a part from another rank gets this rank's own part with the same number and size.
struct Part { void* to; const void* from; size_t bytes; Communicator* of; int root, number; };  // number: per root
static thread_local std::vector<Part> parts;
static thread_local int groups = 0;  // number of open groups
int ncclGroupStart() { groups++; return 0; }
int ncclGroupEnd() {
    if (--groups > 0) return 0;
    for (auto& part : parts)
        for (auto& own : parts)
            if (part.root != own.root && own.root == own.of->rank && own.of == part.of && own.number == part.number &&
                own.bytes == part.bytes)
                move(part.to, own.from, part.bytes);
    parts.clear();
    return 0;
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* of, void*) {
    size_t bytes = bytes_of(count, type);
    int number = 0;
    for (auto& part : parts) number += part.of == of && part.root == root;
    if (groups > 0) parts.push_back({to, from, bytes, of, root, number});
    move(to, from, bytes);
    return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Communicator* of, void*) {
    move(to, from, bytes_of(count, type));
    if (operation == 0 && bytes_of(count, type) <= SMALL) {  // a sum of equal numbers; floating point stays unknown
        if (type == 2 || type == 3) scale((int32_t*)to, count, of->ranks);
        if (type == 4 || type == 5) scale((int64_t*)to, count, of->ranks);
        if (type == 0) scale((int8_t*)to, count, of->ranks);
        if (type == 1) scale((uint8_t*)to, count, of->ranks);
    }
    return 0;
}
int ncclReduce(const void* from, void* to, size_t count, int type, int operation, int, Communicator* of, void* stream) {
    return ncclAllReduce(from, to, count, type, operation, of, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* of, void*) {
    size_t bytes = bytes_of(count, type);
    for (int rank = 0; rank < of->ranks; rank++) move((char*)to + rank * bytes, from, bytes);
    return 0;
}
int ncclGather(const void* from, void* to, size_t count, int type, int root, Communicator* of, void* stream) {
    return root == of->rank ? ncclAllGather(from, to, count, type, of, stream) : 0;
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int operation, Communicator* of, void* stream) {
    return ncclAllReduce((const char*)from + of->rank * bytes_of(count, type), to, count, type, operation, of, stream);
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, Communicator* of, void*) {
    move(to, from, bytes_of(count, type) * of->ranks);
    return 0;
}
int ncclRedOpCreatePreMulSum(int* made, void*, int, int, Communicator*) { *made = 5; return 0; }

}  // extern "C"
