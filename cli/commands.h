// One function per command; each lives in the file of its name.
#pragma once

#include <CLI/CLI.hpp>

#include "cli/session.h"

namespace octavo {

void AddSubmit(CLI::App& app, Session& session);
void AddList(CLI::App& app, Session& session);
void AddDescribe(CLI::App& app, Session& session);
void AddWatch(CLI::App& app, Session& session);
void AddCancel(CLI::App& app, Session& session);
void AddSuspend(CLI::App& app, Session& session);
void AddResume(CLI::App& app, Session& session);
void AddCheckpoint(CLI::App& app, Session& session);
void AddProfile(CLI::App& app, Session& session);
void AddLogs(CLI::App& app, Session& session);
void AddEvents(CLI::App& app, Session& session);
void AddExplain(CLI::App& app, Session& session);
void AddFp8(CLI::App& app, Session& session);
void AddWorkers(CLI::App& app, Session& session);
void AddDrain(CLI::App& app, Session& session);
void AddPrecision(CLI::App& app, Session& session);
void AddData(CLI::App& app, Session& session);
void AddDataTrainTokenizer(CLI::App& group, Session& session);  // of AddData
void AddCheckpoints(CLI::App& app, Session& session);
void AddCheckpointsDiff(CLI::App& group, Session& session);  // of AddCheckpoints
void AddExport(CLI::App& app, Session& session);
void AddImport(CLI::App& app, Session& session);
void AddEval(CLI::App& app, Session& session);
void AddGenerate(CLI::App& app, Session& session);
void AddVersion(CLI::App& app, Session& session);
void AddSpecReference(CLI::App& app, Session& session);
void AddCompletion(CLI::App& app, Session& session);

}  // namespace octavo
