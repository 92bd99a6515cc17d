/* Runs chunk_kda_fwd the way an aclnn program does: describe device memory as tensors, ask for the workspace, execute
   on a stream, copy back. */

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_chunk_kda_fwd.h"

enum { kB = 1, kT = 128, kH = 4, kK = 128, kV = 128, kC = 64 };

/* Ends the program when a call fails, with the library's own words. */
static void check(int status, const char* call) {
  const char* message;
  if (status == ACL_SUCCESS) return;
  message = aclGetRecentErrMsg();
  fprintf(stderr, "%s returned %d: %s\n", call, status, message ? message : "no message");
  exit(EXIT_FAILURE);
}

#define CHECK(call) check((call), #call)

/* A row-major tensor and the device memory behind it. */
typedef struct {
  aclTensor* tensor;
  void* memory;
  size_t bytes;
} Tensor;

static size_t elements(const int64_t* shape, size_t rank) {
  size_t count = 1;
  size_t axis;
  for (axis = 0; axis < rank; ++axis) count *= (size_t)shape[axis];
  return count;
}

static Tensor make_tensor(aclDataType type, const int64_t* shape, size_t rank) {
  Tensor result;
  int64_t strides[8];
  int64_t stride = 1;
  size_t axis;
  for (axis = rank; axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  result.bytes = elements(shape, rank) * aclDataTypeSize(type);
  CHECK(aclrtMalloc(&result.memory, result.bytes, ACL_MEM_MALLOC_HUGE_FIRST));
  result.tensor = aclCreateTensor(shape, rank, type, strides, 0, ACL_FORMAT_ND, shape, rank, result.memory);
  if (result.tensor == NULL) check(-1, "aclCreateTensor");
  return result;
}

static void destroy_tensor(Tensor* tensor) {
  CHECK(aclDestroyTensor(tensor->tensor));
  CHECK(aclrtFree(tensor->memory));
}

/* Uniform in [low, high). */
static float random_number(float low, float high) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return low + (high - low) * (float)(state >> 40) / 16777216.0f;
}

static Tensor make_random(aclDataType type, const int64_t* shape, size_t rank, float low, float high) {
  const Tensor result = make_tensor(type, shape, rank);
  const size_t count = elements(shape, rank);
  size_t i;
  void* host = NULL;
  CHECK(aclrtMallocHost(&host, result.bytes));
  for (i = 0; i < count; ++i) {
    const float value = random_number(low, high);
    if (type == ACL_FLOAT16) {
      ((aclFloat16*)host)[i] = aclFloatToFloat16(value);
    } else {
      ((float*)host)[i] = value;
    }
  }
  CHECK(aclrtMemcpy(result.memory, result.bytes, host, result.bytes, ACL_MEMCPY_HOST_TO_DEVICE));
  CHECK(aclrtFreeHost(host));
  return result;
}

static void print_row(const char* name, const Tensor* tensor, size_t row, size_t columns) {
  aclFloat16* host = malloc(tensor->bytes);
  size_t i;
  if (host == NULL) check(-1, "malloc");
  CHECK(aclrtMemcpy(host, tensor->bytes, tensor->memory, tensor->bytes, ACL_MEMCPY_DEVICE_TO_HOST));
  printf("%s:", name);
  for (i = 0; i < 4; ++i) printf(" %.5f", (double)aclFloat16ToFloat(host[row * columns + i]));
  printf(" ...\n");
  free(host);
}

int main(void) {
  const int64_t row_shape[] = {kB, kT, kH, kK}; /* layout BSND; K = V here */
  const int64_t beta_shape[] = {kB, kT, kH};
  const int64_t chunk_shape[] = {kB, kH, kT, kC};
  const int64_t state_shape[] = {kB, kH, kK, kV};
  const double scale = 0.08838834764831845; /* K ** -0.5 */
  Tensor q, k, v, g, beta, attn_out, aqk, akk, final_state;
  aclrtStream stream = NULL;
  aclOpExecutor* executor = NULL;
  uint64_t workspace_size = 0;
  void* workspace = NULL;

  CHECK(aclInit(NULL));
  CHECK(aclrtSetDevice(0));
  CHECK(aclrtCreateStream(&stream));

  q = make_random(ACL_FLOAT16, row_shape, 4, -0.15f, 0.15f);
  k = make_random(ACL_FLOAT16, row_shape, 4, -0.15f, 0.15f);
  v = make_random(ACL_FLOAT16, row_shape, 4, -1.0f, 1.0f);
  g = make_random(ACL_FLOAT, row_shape, 4, -0.01f, 0.0f);
  beta = make_random(ACL_FLOAT, beta_shape, 3, 0.0f, 1.0f);
  attn_out = make_tensor(ACL_FLOAT16, row_shape, 4);
  aqk = make_tensor(ACL_FLOAT16, chunk_shape, 4);
  akk = make_tensor(ACL_FLOAT16, chunk_shape, 4);
  final_state = make_tensor(ACL_FLOAT, state_shape, 4);

  /* Outputs that are not wanted are null. */
  CHECK(aclnnChunkKdaFwdGetWorkspaceSize(q.tensor, k.tensor, v.tensor, g.tensor, beta.tensor, NULL, NULL, NULL, NULL,
                                         NULL, "BSND", scale, kC, true, -5.0, false, false, attn_out.tensor,
                                         final_state.tensor, NULL, aqk.tensor, akk.tensor, NULL, NULL, NULL, NULL, NULL,
                                         NULL, &workspace_size, &executor));
  printf("workspace: %" PRIu64 " bytes\n", workspace_size);
  if (workspace_size > 0) CHECK(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_HUGE_FIRST));
  CHECK(aclnnChunkKdaFwd(workspace, workspace_size, executor, stream));
  CHECK(aclrtSynchronizeStream(stream));
  print_row("attn_out, last token", &attn_out, (kT - 1) * kH, kV);
  print_row("Akk, last token", &akk, kT - 1, kC);

  /* An illegal argument is refused with a status and a message. */
  if (aclnnChunkKdaFwdGetWorkspaceSize(q.tensor, k.tensor, v.tensor, g.tensor, beta.tensor, NULL, NULL, NULL, NULL,
                                       NULL, "BSND", scale, 32, true, -5.0, false, false, attn_out.tensor, NULL, NULL,
                                       aqk.tensor, akk.tensor, NULL, NULL, NULL, NULL, NULL, NULL, &workspace_size,
                                       &executor) == ACLNN_ERR_PARAM_INVALID) {
    printf("refused: %s\n", aclGetRecentErrMsg());
  }

  if (workspace != NULL) CHECK(aclrtFree(workspace));
  destroy_tensor(&q);
  destroy_tensor(&k);
  destroy_tensor(&v);
  destroy_tensor(&g);
  destroy_tensor(&beta);
  destroy_tensor(&attn_out);
  destroy_tensor(&aqk);
  destroy_tensor(&akk);
  destroy_tensor(&final_state);
  CHECK(aclrtDestroyStream(stream));
  CHECK(aclrtResetDevice(0));
  CHECK(aclFinalize());
  return EXIT_SUCCESS;
}
