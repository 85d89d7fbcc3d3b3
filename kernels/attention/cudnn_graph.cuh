// cuDNN's backend API in the few words that attention needs: tensors, operations, one plan.
//
// cuDNN is opened at run time (libcudnn.so.9): the plug-in loads on machines without it, and then
// the plain kernels of attention_cuda.cu run. A graph is written as a list of operations over
// tensors; Build finalises the first engine configuration that the heuristics offer and the library
// accepts.
#pragma once

#include <cudnn_graph.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace octavo::cuda {

// Function pointers of the library; null handle: not there.
struct CudnnLibrary {
  void* handle = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  static const CudnnLibrary& Get() {
    static const CudnnLibrary library = Open();
    return library;
  }

 private:
  static CudnnLibrary Open() {
    CudnnLibrary l;
    const char* forced = std::getenv("OCTAVO_CUDNN");
    std::vector<std::string> names;
    if (forced != nullptr) {
      names.push_back(forced);
    } else {
      names = {"libcudnn.so.9", "/usr/local/cuda/lib64/libcudnn.so.9"};
    }
    for (const std::string& name : names) {
      l.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (l.handle != nullptr) {
        break;
      }
    }
    if (l.handle == nullptr) {
      return l;
    }
    bool all = true;
    const auto load = [&](auto* pointer, const char* symbol) {
      *pointer =
          reinterpret_cast<std::remove_pointer_t<decltype(pointer)>>(dlsym(l.handle, symbol));
      all = all && *pointer != nullptr;
    };
    load(&l.create, "cudnnCreate");
    load(&l.destroy, "cudnnDestroy");
    load(&l.set_stream, "cudnnSetStream");
    load(&l.version, "cudnnGetVersion");
    load(&l.create_descriptor, "cudnnBackendCreateDescriptor");
    load(&l.destroy_descriptor, "cudnnBackendDestroyDescriptor");
    load(&l.set_attribute, "cudnnBackendSetAttribute");
    load(&l.get_attribute, "cudnnBackendGetAttribute");
    load(&l.finalize, "cudnnBackendFinalize");
    load(&l.execute, "cudnnBackendExecute");
    if (!all) {
      l.handle = nullptr;
    }
    return l;
  }
};

using Dims = std::array<std::int64_t, 4>;

class CudnnGraph {
 public:
  explicit CudnnGraph(cudnnHandle_t handle) : lib_(CudnnLibrary::Get()), handle_(handle) {}
  CudnnGraph(const CudnnGraph&) = delete;
  CudnnGraph& operator=(const CudnnGraph&) = delete;
  ~CudnnGraph() {
    for (auto it = owned_.rbegin(); it != owned_.rend(); ++it) {
      lib_.destroy_descriptor(*it);
    }
  }

  using Node = cudnnBackendDescriptor_t;

  // A tensor in memory; its pointer is given at Run under the uid returned through *uid.
  Node Real(const Dims& dims, const Dims& strides, cudnnDataType_t type, std::int64_t* uid) {
    *uid = next_uid_;
    return Tensor(dims, strides, type, false, false);
  }
  // An intermediate, packed unless strides are given.
  Node Virtual(const Dims& dims, cudnnDataType_t type = CUDNN_DATA_FLOAT) {
    return Virtual(dims, {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1}, type);
  }
  Node Virtual(const Dims& dims, const Dims& strides, cudnnDataType_t type) {
    return Tensor(dims, strides, type, true, false);
  }
  // A host value read at Run.
  Node Scalar(std::int64_t* uid) {
    *uid = next_uid_;
    return Tensor({1, 1, 1, 1}, {1, 1, 1, 1}, CUDNN_DATA_FLOAT, false, true);
  }

  void Pointwise(cudnnPointwiseMode_t mode, Node x, Node b, Node t, Node y,
                 cudnnDataType_t compute = CUDNN_DATA_FLOAT, std::int64_t axis = -1) {
    Node pw = Make(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    Set(pw, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    Set(pw, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
    if (axis >= 0) {
      Set(pw, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    }
    Finalize(pw);
    Node op = Make(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    SetNode(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pw);
    SetNode(op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b != nullptr) {
      SetNode(op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    }
    if (t != nullptr) {
      SetNode(op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    }
    SetNode(op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    AddOp(op);
  }
  void MatMul(Node a, Node b, Node c) {
    Node m = Make(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    Set(m, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    Finalize(m);
    Node op = Make(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    SetNode(op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    SetNode(op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    SetNode(op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    SetNode(op, CUDNN_ATTR_OPERATION_MATMUL_DESC, m);
    AddOp(op);
  }
  void Reduce(cudnnReduceTensorOp_t mode, Node x, Node y) {
    Node r = Make(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    Set(r, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, mode);
    Set(r, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    Finalize(r);
    Node op = Make(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    SetNode(op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    SetNode(op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    SetNode(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, r);
    AddOp(op);
  }
  void Reshape(Node x, Node y) {
    Node op = Make(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    SetNode(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    SetNode(op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    AddOp(op);
  }

  // False: no configuration was accepted (shape, library or device).
  bool Build() {
    if (!good_) {
      return false;
    }
    Node graph = Make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    Set(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle_);
    Check(lib_.set_attribute(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                             static_cast<std::int64_t>(ops_.size()), ops_.data()));
    Finalize(graph);
    Node heuristics = Make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    SetNode(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    Set(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
    Finalize(heuristics);
    if (!good_) {
      return false;
    }
    constexpr std::int64_t kWanted = 8;
    std::array<Node, kWanted> configs;
    for (Node& c : configs) {
      c = Make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    }
    std::int64_t found = 0;
    Check(lib_.get_attribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR, kWanted, &found, configs.data()));
    for (std::int64_t i = 0; good_ && i < found && i < kWanted; ++i) {
      Node plan = Make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      Set(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle_);
      SetNode(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[static_cast<std::size_t>(i)]);
      if (lib_.finalize(plan) != CUDNN_STATUS_SUCCESS) {
        continue;
      }
      std::int64_t count = 0;
      Check(lib_.get_attribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                               &count, &workspace_bytes_));
      plan_ = plan;
      return good_;
    }
    return false;
  }
  std::int64_t workspace_bytes() const { return workspace_bytes_; }

  // 0, or a cuDNN status.
  int Run(const std::vector<std::pair<std::int64_t, const void*>>& pointers, void* workspace) {
    std::vector<std::int64_t> uids;
    std::vector<const void*> data;
    for (const auto& [uid, pointer] : pointers) {
      uids.push_back(uid);
      data.push_back(pointer);
    }
    Node pack = nullptr;
    cudnnStatus_t status = lib_.create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    const auto set = [&](cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                         std::int64_t count, const void* value) {
      if (status == CUDNN_STATUS_SUCCESS) {
        status = lib_.set_attribute(pack, name, type, count, value);
      }
    };
    const std::int64_t n = static_cast<std::int64_t>(uids.size());
    set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, n, uids.data());
    set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n, data.data());
    set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    if (status == CUDNN_STATUS_SUCCESS) {
      status = lib_.finalize(pack);
    }
    if (status == CUDNN_STATUS_SUCCESS) {
      status = lib_.execute(handle_, plan_, pack);
    }
    if (pack != nullptr) {
      lib_.destroy_descriptor(pack);
    }
    return static_cast<int>(status);
  }

 private:
  void Check(cudnnStatus_t status) { good_ = good_ && status == CUDNN_STATUS_SUCCESS; }
  Node Make(cudnnBackendDescriptorType_t type) {
    Node node = nullptr;
    Check(lib_.create_descriptor(type, &node));
    if (node != nullptr) {
      owned_.push_back(node);
    }
    return node;
  }
  void Finalize(Node node) {
    if (good_) {
      Check(lib_.finalize(node));
    }
  }
  template <class T>
  void Set(Node node, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
    if (good_) {
      Check(lib_.set_attribute(node, name, type, 1, &value));
    }
  }
  void SetNode(Node node, cudnnBackendAttributeName_t name, Node value) {
    Set(node, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value);
  }
  void AddOp(Node op) {
    Finalize(op);
    ops_.push_back(op);
  }
  Node Tensor(const Dims& dims, const Dims& strides, cudnnDataType_t type, bool is_virtual,
              bool by_value) {
    Node t = Make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    Set(t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
    if (good_) {
      Check(lib_.set_attribute(t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims.data()));
      Check(lib_.set_attribute(t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.data()));
    }
    Set(t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, next_uid_++);
    Set(t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::int64_t{16});
    Set(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
    Set(t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value);
    Finalize(t);
    return t;
  }

  const CudnnLibrary& lib_;
  cudnnHandle_t handle_;
  bool good_ = true;
  std::int64_t next_uid_ = 1;
  std::vector<Node> owned_, ops_;
  Node plan_ = nullptr;
  std::int64_t workspace_bytes_ = 0;
};

}  // namespace octavo::cuda
