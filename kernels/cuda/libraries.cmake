# Optional libraries of the plug-in. cuDNN and NCCL are opened at run time (dlopen), so that the
# plug-in loads where they are missing; only their headers decide what is compiled.
target_compile_definitions(octavo_cuda PRIVATE OCTAVO_CUDA_VERSION="${CUDAToolkit_VERSION}")
find_path(OCTAVO_CUDNN_INCLUDE cudnn_graph.h HINTS ${CUDAToolkit_INCLUDE_DIRS}
          PATH_SUFFIXES x86_64-linux-gnu)
if(OCTAVO_CUDNN_INCLUDE)
  target_include_directories(octavo_cuda PRIVATE ${OCTAVO_CUDNN_INCLUDE})
  target_compile_definitions(octavo_cuda PRIVATE OCTAVO_HAVE_CUDNN)
endif()
find_path(OCTAVO_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
if(OCTAVO_NCCL_INCLUDE AND EXISTS ${CMAKE_SOURCE_DIR}/worker/comm/nccl.cc)
  target_include_directories(octavo_cuda PRIVATE ${OCTAVO_NCCL_INCLUDE})
  target_compile_definitions(octavo_cuda PRIVATE OCTAVO_HAVE_NCCL)
endif()
message(STATUS "Octavo: cuDNN headers ${OCTAVO_CUDNN_INCLUDE}, NCCL headers ${OCTAVO_NCCL_INCLUDE}")
# Nothing but octavo_plugin_v1 is visible: the CPU backend of the process has types of the same names.
set_target_properties(octavo_cuda PROPERTIES CXX_VISIBILITY_PRESET hidden
                      CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_link_options(octavo_cuda PRIVATE -Wl,-Bsymbolic -Wl,--exclude-libs,ALL)
