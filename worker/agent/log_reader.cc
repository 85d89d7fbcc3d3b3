#include "worker/agent/log_reader.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "base/file.h"
#include "base/status.h"
#include "proto/limits.h"

namespace octavo {
namespace {

absl::StatusOr<std::int64_t> NewestAttempt(const std::string& job_folder) {
  absl::StatusOr<std::vector<std::string>> names = PosixFileSystem::Get().ListDirectory(job_folder);
  if (!names.ok()) {
    return NotFoundError(StrCat("this worker has no log of the job: ", Message(names.status())));
  }
  std::int64_t newest = -1;
  for (const std::string& name : *names) {
    newest = std::max(newest, ParseInt64(name).value_or(-1));
  }
  if (newest < 0) {
    return NotFoundError(StrCat("no attempt in ", job_folder));
  }
  return newest;
}

// Where the last `lines` lines begin, looking back at most one chunk.
absl::StatusOr<std::int64_t> TailOffset(const RandomAccessFile& file, std::int64_t lines) {
  const std::int64_t window = std::min<std::int64_t>(file.size_bytes(), kMaxLogChunkBytes);
  const std::int64_t begin = file.size_bytes() - window;
  std::string text(static_cast<std::size_t>(window), '\0');
  RETURN_IF_ERROR(file.ReadAt(begin, text));
  std::size_t at = text.size();
  if (at > 0 && text[at - 1] == '\n') {
    --at;  // the end of the last line is not the beginning of one more
  }
  for (std::int64_t line = 0; line < lines; ++line) {
    const std::size_t found = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
    if (found == std::string::npos) {
      return begin;
    }
    at = found;
  }
  return begin + static_cast<std::int64_t>(at) + 1;
}

absl::Status Fill(const iv1::LogRequest& request, const std::string& ranks_folder,
                  iv1::LogReply* reply) {
  if (request.job_uid().empty() || request.job_uid()[0] == '.' ||
      request.job_uid().find('/') != std::string::npos) {
    return InvalidArgumentError(StrCat("job uid \"", request.job_uid(), "\" is not a valid name"));
  }
  const std::string job_folder = JoinPath(ranks_folder, request.job_uid());
  std::int64_t attempt = request.attempt();
  if (attempt <= 0) {
    ASSIGN_OR_RETURN(attempt, NewestAttempt(job_folder));
  }
  const std::string path =
      StrCat(job_folder, "/", attempt, "/", std::max(0, request.rank()), "/rank.log");
  ASSIGN_OR_RETURN(const std::unique_ptr<RandomAccessFile> file,
                   PosixFileSystem::Get().OpenForRead(path));
  std::int64_t offset = std::clamp<std::int64_t>(request.offset(), 0, file->size_bytes());
  if (offset == 0 && request.tail_lines() > 0) {
    ASSIGN_OR_RETURN(offset, TailOffset(*file, request.tail_lines()));
  }
  const std::int64_t limit = request.max_bytes() > 0
                                 ? std::min(request.max_bytes(), kMaxLogChunkBytes)
                                 : kMaxLogChunkBytes;
  const std::int64_t count = std::min(limit, file->size_bytes() - offset);
  std::string* text = reply->mutable_text();
  text->resize(static_cast<std::size_t>(count));
  RETURN_IF_ERROR(file->ReadAt(offset, *text));
  reply->set_next_offset(offset + count);
  reply->set_end(offset + count >= file->size_bytes());
  return absl::OkStatus();
}

}  // namespace

iv1::LogReply ReadLogChunk(const iv1::LogRequest& request, const std::string& ranks_folder) {
  iv1::LogReply reply;
  reply.set_id(request.id());
  const absl::Status status = Fill(request, ranks_folder, &reply);
  if (!status.ok()) {
    reply.clear_text();
    reply.set_end(true);
    reply.set_error(Message(status));
  }
  return reply;
}

}  // namespace octavo
